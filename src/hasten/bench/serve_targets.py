"""Who is asked: any server with OpenAI's completions over HTTP, or an engine in this process."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hasten.bench.serve_workload import Planned, Workload
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.engine.settings import COUNTERS, GAUGES
from hasten.errors import ConfigError, HastenError

if TYPE_CHECKING:
    from hasten.engine.async_engine import AsyncEngine

# field of Stats -> name of the metric, behind `hasten:` or `vllm:`
METRICS = {field: name for name, (field, _) in GAUGES.items()}
METRICS |= {field: f"{name}_total" for name, (field, _) in COUNTERS.items()}
_LINE = re.compile(r"^(?:hasten|vllm):(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN)", re.MULTILINE)


@dataclass(slots=True)
class RequestOutcome:
    """The result of one request. Times in seconds on one clock; `pieces`: when something came, for each sample."""

    planned: Planned
    sent: float = 0.0
    ended: float = 0.0
    pieces: dict[int, list[float]] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class HttpTarget:
    """A server at a URL such as http://127.0.0.1:8000. model None: the first that it names."""

    def __init__(self, url: str, *, model: str | None, key: str | None, vocabulary: int | None) -> None:
        import httpx

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=None)
        self.model, self.vocabulary = model, vocabulary or 0

    async def prepare(self) -> None:
        """Ask for the model's name and the size of its vocabulary, where they were not given."""
        import httpx

        try:
            answer = await self._client.get("/v1/models", timeout=30)
            answer.raise_for_status()
            known = {entry["id"]: entry for entry in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.url}/v1/models does not answer as OpenAI's API does: {error}") from None
        self.model = self.model or next(iter(known), None)
        if self.model is None:
            raise ConfigError(f"{self.url} serves no model")
        size = known.get(self.model, {}).get("vocab_size")
        self.vocabulary = self.vocabulary or (size if isinstance(size, int) else 1000)  # every real one has more

    async def ask(self, planned: Planned, workload: Workload, *, seed: int) -> RequestOutcome:
        """Send one request and wait for its end; an error is in the outcome."""
        import httpx

        outcome = RequestOutcome(planned)
        body = {
            "model": self.model,
            "prompt": list(planned.prompt),
            "max_tokens": planned.output_tokens,
            "n": workload.n,
            "temperature": workload.temperature,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body)
        outcome.sent = time.perf_counter()
        try:
            headers = {"Content-Type": "application/json"}
            async with self._client.stream("POST", "/v1/completions", content=data, headers=headers) as answer:
                if answer.status_code != 200:
                    outcome.error = f"{answer.status_code}: {(await answer.aread())[:300].decode(errors='replace')}"
                else:
                    await self._read(answer, outcome)
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()
        if outcome.error is None and not outcome.pieces:
            outcome.error = "nothing came"
        return outcome

    async def _read(self, answer: Any, outcome: RequestOutcome) -> None:
        rest = b""
        async for block in answer.aiter_raw():
            now = time.perf_counter()
            *events, rest = (rest + block).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: {"):
                    continue
                chunk = json.loads(event[6:])
                if "error" in chunk:
                    outcome.error = str(chunk["error"].get("message"))[:300]
                for choice in chunk.get("choices", ()):
                    outcome.pieces.setdefault(choice["index"], []).append(now)
                if usage := chunk.get("usage"):
                    outcome.prompt_tokens = usage["prompt_tokens"]
                    outcome.output_tokens = usage["completion_tokens"]
                    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def counters(self) -> dict[str, float]:
        """What the server counts, by the names of METRICS; empty if it does not say."""
        import httpx

        with suppress(httpx.HTTPError):
            answer = await self._client.get("/metrics", timeout=10)
            if answer.status_code == 200:
                found = {name: float(value) for name, value in _LINE.findall(answer.text)}
                return {name: found[metric] for name, metric in METRICS.items() if metric in found}
        return {}

    async def close(self) -> None:
        await self._client.aclose()


class EngineTarget:
    """An engine in this process: what serving costs without HTTP."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.vocabulary = engine.engine.model.config.vocab_size
        self._count = 0

    async def ask(self, planned: Planned, workload: Workload, *, seed: int) -> RequestOutcome:
        outcome = RequestOutcome(planned, prompt_tokens=len(planned.prompt))
        params = SamplingParams(
            temperature=workload.temperature, seed=seed, max_new_tokens=planned.output_tokens, ignore_eos=True
        )
        self._count += 1
        request = Request(id=f"bench-{self._count}", prompt=planned.prompt, params=params, n=workload.n)
        outcome.sent = time.perf_counter()
        try:
            async for piece in self._engine.generate(request):
                if piece.tokens:
                    outcome.pieces.setdefault(piece.index, []).append(time.perf_counter())
                    outcome.output_tokens += len(piece.tokens)
                    outcome.cached_tokens = piece.cached_tokens
                if piece.finish_reason in ("error", "abort"):
                    outcome.error = str(piece.stop_reason)
        except HastenError as error:
            outcome.error = str(error)
        outcome.ended = time.perf_counter()
        return outcome

    async def counters(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {name: float(getattr(stats, name)) for name in METRICS}

    async def close(self) -> None:
        await self._engine.close()


Target = HttpTarget | EngineTarget
