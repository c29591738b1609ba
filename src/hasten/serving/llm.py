"""`hasten.LLM`: many prompts at once in process, with the engine that the server uses."""

from __future__ import annotations

import itertools
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.errors import ConfigError
from hasten.generation.generate import Prompt, encode_prompts
from hasten.generation.params import SamplingParams
from hasten.model.transformer import Transformer
from hasten.serving.async_engine import AsyncEngine
from hasten.serving.counting import Stats
from hasten.serving.engine import Engine
from hasten.serving.engine_thread import Sink
from hasten.serving.request import EngineFailed, FinishReason, QueueFull, Request, RequestOutput, TokenLogprob
from hasten.serving.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One of the texts of a prompt. tokens include the one that ended it (an end-of-text id), text does not."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one prompt: its texts, the best first where they were ranked."""

    completions: list[Completion]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None

    @property
    def text(self) -> str:
        """The first text."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason


class LLM:
    """A model that continues many prompts together: paged cache, continuous batching, sharing.

        llm = hasten.LLM("folder-or-hub-id")
        answers = llm.generate(["Once upon", "In the end"], hasten.SamplingParams(temperature=0))

    The methods with an `a` in front are for event loops; the first use of one starts a thread that runs the engine from
    then on, for the others, too. As many may be awaited at once as `queue_limit` allows; further ones raise QueueFull
    (`generate` holds its prompts back by itself).
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        settings: EngineSettings | None = None,
        *,
        dtype: str | None = None,
        **more: Any,
    ) -> None:
        """model: a loaded one, or a folder or hub id, which is loaded (in its own dtype unless `dtype` says otherwise)
        and fused where it can be. settings, or single fields of `EngineSettings` by keyword. Raises ConfigError.
        """
        if more:
            if settings is not None:
                raise ConfigError(f"settings and {', '.join(more)} were given; give one or the other")
            try:
                settings = EngineSettings(**more)
            except TypeError as error:
                raise ConfigError(f"unknown setting of the engine: {error}") from None
        if isinstance(model, str | Path):
            from hasten.model.fused import fuse_where_it_fits
            from hasten.model.load import load

            model = fuse_where_it_fits(load(model, dtype=dtype))
        elif dtype is not None:
            raise ConfigError("dtype is for a model that is loaded here; this one has its own")
        self.model = model
        self.engine = Engine(model, model.tokenizer, settings or EngineSettings())
        self._numbers = itertools.count()
        self._async: AsyncEngine | None = None
        self._readers: dict[str, tuple[int, Sink]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **request: Any,
    ) -> list[Answer]:
        """Continue all prompts; the answers come in their order.

        params: for all, or one for each prompt. request: fields of `Request` for all of them (n, best_of, beam_width,
        logprobs, …). Raises RequestRefused before anything is computed, EngineFailed when a step failed.
        """
        requests = self._requests(prompts, params, request)
        answers = {one.id: _Collector(one) for one in requests}
        for piece in self._run(requests):
            answers[piece.request_id].add(piece)
        return [answers[one.id].answer() for one in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Iterator[RequestOutput]:
        """The pieces of one prompt's texts as they come (`piece.text`, and `piece.index` where n > 1)."""
        requests = self._requests(prompt, params, request)
        if len(requests) != 1:
            raise ConfigError(f"stream takes one prompt, found {len(requests)}; use generate for several")
        yield from self._run(requests)

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Answer:
        """`generate` of one prompt; many at once by asyncio.gather."""
        (one,) = self._requests(prompt, params, request)
        collector = _Collector(one)
        async for piece in self._started().generate(one):
            collector.add(piece)
        return collector.answer()

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for event loops; closing it gives the request up."""
        (one,) = self._requests(prompt, params, request)
        pieces = self._started().generate(one)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def stats(self) -> Stats:
        return self.engine.stats()

    def close(self) -> None:
        """Let the cache (and the thread, if there is one) go. May be called again."""
        if self._async is not None:
            self._async.thread.close()
        self.engine.close()

    def _started(self) -> AsyncEngine:
        if self._async is None:
            self._async = AsyncEngine(self.engine, sinks=self._readers)  # also for streams that were begun without it
        return self._async

    def _requests(self, prompts: Any, params: Any, request: dict[str, Any]) -> list[Request]:
        encoded = encode_prompts(self.model, prompts)
        given = list(params) if isinstance(params, list | tuple) else [params] * len(encoded)
        rows = [SamplingParams() if row is None else row for row in given]
        if len(rows) != len(encoded):
            raise ConfigError(f"{len(rows)} sampling parameters were given for {len(encoded)} prompts")
        if not all(isinstance(row, SamplingParams) for row in rows):
            raise ConfigError(f"params must be SamplingParams, or a list of them; found {params!r:.80}")
        try:
            requests = [
                Request(id=f"llm-{next(self._numbers)}", prompt=tuple(ids), params=row, **request)
                for ids, row in zip(encoded, rows, strict=True)
            ]
        except TypeError as error:
            raise ConfigError(f"unknown setting of a request: {error}") from None
        return [self.engine.checked(one) for one in requests]

    def _run(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """The pieces of the requests as they come; what is left of them is given up when the caller stops."""
        waiting = list(reversed(requests))
        left = {one.id: set(range(one.n)) for one in requests}
        arrived: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._readers |= {one.id: (one.n, arrived.put) for one in requests}
        try:
            while left:
                while waiting and self._taken(waiting[-1], arrived.put):
                    waiting.pop()
                if self._async is None and arrived.empty():
                    for piece in self.engine.step():  # also those of other streams that are read by turns
                        if (reader := self._readers.get(piece.request_id)) is not None:
                            reader[1](piece)
                    continue
                try:  # where others fill the queue, no piece of ours may come before there is room
                    piece = arrived.get(timeout=0.01 if waiting else None)
                except queue.Empty:
                    continue
                if piece.finish_reason == "error" and (self.engine.error is not None or not piece.prompt_tokens):
                    raise EngineFailed(f"the engine failed: {self.engine.error or piece.stop_reason}")
                if piece.finish_reason is not None:
                    left[piece.request_id].discard(piece.index)
                    if not left[piece.request_id]:
                        del left[piece.request_id]
                yield piece
        finally:
            for one in requests:
                del self._readers[one.id]
                if self._async is not None:
                    self._async.thread.abort(one.id)  # nothing more than its reader, if it is complete
                elif one.id in left:
                    self.engine.abort(one.id)

    def _taken(self, request: Request, sink: Sink) -> bool:
        """Whether there was room for it."""
        try:
            if self._async is None:
                self.engine.add(request)
            else:
                self._async.thread.submit(request, sink)
        except QueueFull:
            return False
        return True


class _Collector:
    """The pieces of one request put together."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.parts: list[list[RequestOutput]] = [[] for _ in range(request.n)]
        self.first: RequestOutput | None = None

    def add(self, piece: RequestOutput) -> None:
        self.first = self.first or piece
        self.parts[piece.index].append(piece)

    def answer(self) -> Answer:
        first = self.first
        assert first is not None
        return Answer(
            completions=[self._completion(parts) for parts in self.parts],
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            prompt_logprobs=None if first.prompt_logprobs is None else list(first.prompt_logprobs),
        )

    def _completion(self, parts: list[RequestOutput]) -> Completion:
        wanted = self.request.logprobs is not None
        return Completion(
            text="".join(piece.text for piece in parts),
            tokens=[token for piece in parts for token in piece.tokens],
            finish_reason=parts[-1].finish_reason if parts else None,
            stop_reason=parts[-1].stop_reason if parts else None,
            logprobs=[told for piece in parts for told in piece.logprobs or ()] if wanted else None,
        )
