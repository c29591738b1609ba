"""`hasten bench serve`: latency and throughput of a server under load."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hasten.cli.options import LoadOptions
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class BenchServe(LoadOptions):
    """Serving: latency, throughput and goodput of any OpenAI-compatible URL, or of the engine in this process."""

    model: str | None = None  # type: ignore[assignment]
    """A folder or hub id that is loaded and measured in this process, without HTTP; with --url its name there."""
    shape: str | None = None
    """In place of --model: a named shape with random weights."""
    url: str | None = None
    """Of a running server, such as http://127.0.0.1:8000."""
    api_key: str | None = None
    """Key of that server."""
    requests: int = 64
    """How many are sent at each rate."""
    rates: str = "inf"
    """Requests a second, several separated by commas: 1,2,4; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution between arrivals: 1 is Poisson, below comes in bursts."""
    concurrency: int | None = None
    """Requests in flight at most."""
    lengths: Literal["fixed", "sharegpt", "alpaca"] = "fixed"
    """Fixed, or drawn around the means of these data sets, up to the next two."""
    prompt_tokens: int = 128
    """Length of prompts, or their longest."""
    output_tokens: int = 64
    """Length of answers, or their longest."""
    spread: float = 0.8
    """Sigma of the lognormal distribution of lengths."""
    shared_prefix_tokens: int = 0
    """Tokens at the beginning that a prompt shares with its group."""
    prefix_groups: int = 1
    """Groups that share a prefix."""
    n: int = 1
    """Samples of each prompt."""
    temperature: float = 0.0
    """Of sampling; with n above 1 at 0 all samples are the same."""
    warmup: int = 2
    """Requests before the first rate that are not counted."""
    goodput_ttft_ms: float | None = None
    """Limit of the time to the first token that a good request keeps."""
    goodput_tpot_ms: float | None = None
    """Limit of the time per output token."""
    goodput_e2e_ms: float | None = None
    """Limit of the whole time."""
    max_sequences: int = 256
    """In process: texts that are generated at the same time."""
    token_budget: int = 512
    """In process: tokens computed in one step."""
    cache_gib: float | None = None
    """In process: memory of the cache in GiB."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """In process: keys and values in the model's own dtype, or in int8."""
    prefix_cache: bool = True
    """In process: share the blocks of prompts that begin alike."""
    vocabulary: int | None = None
    """Token ids of prompts are below it; what the server says, else 1000."""
    seed: int = 0
    """Decides arrivals, lengths, prompts and random weights."""
    json: str | None = None
    """Write the report as JSON to this file; "-": to standard output, and nothing else there."""
    picture: str | None = None
    """Draw latency against load into this PNG."""

    def run(self) -> None:
        from hasten.bench.report import require_writable, write_json
        from hasten.bench.serve import DEFINITIONS, SCHEMA
        from hasten.machine import describe
        from hasten.serving.api import require_packages

        for path in (self.json, self.picture):
            require_writable(path)
        if self.url is None and (self.model is None) == (self.shape is None):
            raise ConfigError(
                "give --url of a running server, or one of --model and --shape to measure in this process"
            )
        if self.url is not None:
            require_packages(("httpx",))
        workload, rates = self._workload(), self._rates()
        summary, requests, target = asyncio.run(self._measure(workload, rates))
        report = {
            "schema": SCHEMA,
            "kind": "serve",
            "machine": describe().to_json(),
            "target": target,
            "workload": workload.to_json() | {"rates": [None if math.isinf(rate) else rate for rate in rates]},
            "summary": summary,
            "requests": requests,
            "definitions": DEFINITIONS,
        }
        if self.json is not None:
            write_json(self.json, report)
        if self.picture is not None:
            from hasten.bench.serve_picture import draw_latency

            draw_latency(report, self.picture)
        for name, text in DEFINITIONS.items():
            print(f"  {name}: {text}", file=sys.stderr)
        if any("error" in entry for entry in summary):
            raise SystemExit(1)

    async def _measure(self, workload: Any, rates: list[float]) -> Any:
        from hasten.bench.serve import LatencyLimits, run_loads
        from hasten.bench.serve_targets import EngineTarget, HttpTarget

        limits = LatencyLimits(ttft_ms=self.goodput_ttft_ms, tpot_ms=self.goodput_tpot_ms, e2e_ms=self.goodput_e2e_ms)
        target: EngineTarget | HttpTarget
        if self.url is not None:
            target = HttpTarget(self.url, model=self.model, key=self.api_key, vocabulary=self.vocabulary)
            await target.prepare()
            facts: dict[str, Any] = {"in_process": False, "model": target.model}
        else:
            target = EngineTarget(self._engine())
            facts = {"in_process": True, "dtype": self.dtype, "quantize": self.quantize}
            facts["model"] = self.shape or str(self.model).rstrip("/").rsplit("/", 1)[-1]
            facts |= {"max_sequences": self.max_sequences, "token_budget": self.token_budget}
        try:
            summary, requests = await run_loads(
                target, workload, rates=rates, warmup=self.warmup, limits=limits, show=show, progress=_progress
            )
        finally:
            await target.close()
        return summary, requests, facts

    def _engine(self) -> Any:
        from hasten.serving.async_engine import AsyncEngine
        from hasten.serving.engine import Engine
        from hasten.serving.settings import EngineSettings

        settings = EngineSettings(
            max_sequences=self.max_sequences,
            token_budget=self.token_budget,
            cache_bytes=None if self.cache_gib is None else int(self.cache_gib * 2**30),
            kv_cache_dtype=self.kv_cache_dtype,
            prefix_cache=self.prefix_cache,
        )
        model = self.load()
        return AsyncEngine(Engine(model, model.tokenizer, settings))

    def read_model(self, device: str) -> Transformer:
        """The checkpoint, or random weights of the shape."""
        if self.shape is None:
            return super().read_model(device)
        import torch

        from hasten.bench.shapes import Subject

        dtype = torch.bfloat16 if self.dtype == "auto" else getattr(torch, self.dtype)
        return Subject(shape=self.shape).build(dtype=dtype, device=device, seed=self.seed)

    def _workload(self) -> Any:
        from hasten.bench.serve_workload import Workload

        return Workload(
            requests=self.requests,
            burstiness=self.burstiness,
            concurrency=self.concurrency,
            lengths=self.lengths,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            spread=self.spread,
            shared_prefix_tokens=self.shared_prefix_tokens,
            prefix_groups=self.prefix_groups,
            n=self.n,
            temperature=self.temperature,
            seed=self.seed,
        )

    def _rates(self) -> list[float]:
        try:
            rates = [float(part) for part in self.rates.split(",") if part.strip()]
        except ValueError:
            rates = []
        if not rates or not all(rate > 0 for rate in rates):
            raise ConfigError(f"--rates takes numbers above 0 separated by commas, such as 1,2,4; found {self.rates!r}")
        return rates


def _progress(rate: float, done: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{rate:g} requests/s: {done} done", end="", file=sys.stderr)


def show(summary: dict[str, Any]) -> None:
    """One load, to standard error."""
    if "error" in summary:
        print(f"all {summary['failed']} requests failed: {summary['error']}", file=sys.stderr)
        return
    rate = "all at once" if summary["rate"] is None else f"{summary['rate']:g} requests/s"
    lines = [
        f"\r{rate}: {summary['completed']} completed, {summary['failed']} failed in {summary['seconds']:.1f} s; "
        f"{summary['output_tokens_per_second']:.1f} output tokens/s, {summary['requests_per_second']:.2f} requests/s, "
        f"goodput {summary['goodput']:.2f} requests/s"
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        found = summary[f"{name}_ms"]
        if found:
            figures = "  ".join(f"{key} {value:,.1f}" for key, value in found.items())
            lines.append(f"  {name:<5} ms  {figures}")
    for key, text in (("prefix_hit_rate", "prefix cache hits"), ("blocks_saved", "blocks saved by sharing")):
        if key in summary:
            lines.append(f"  {text}: {summary[key]:.1%}")
    print("\n".join(lines), file=sys.stderr)
