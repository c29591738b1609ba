"""Answers: the engine's outputs of one HTTP request become the parts of its answer, streamed or whole.

`AnswerBuilder` follows the outputs; a protocol's subclass makes parts of them. `ChoiceBuilder` is OpenAI's form with
choices, whose whole answer is its chunks joined.
Events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from hasten.engine.request import Request, RequestOutput, SlowReader, TokenLogprob
from hasten.errors import HastenError
from hasten.server.bodies import SamplingBody, StreamOptions
from hasten.server.build_request import samples_of
from hasten.server.errors import ApiError, ClientGone, from_library, overloaded
from hasten.server.logs import LOGGER
from hasten.server.metrics import Metrics
from hasten.server.service import Service
from hasten.server.structured import grammar_of

Body = TypeVar("Body", bound=SamplingBody)
Json = dict[str, Any]
PING = 15.0  # seconds of silence
LOWEST = -9999.0  # instead of minus infinity, which JSON lacks (vLLM's value)


class AnswerBuilder(ABC, Generic[Body]):
    """Builds the response of one HTTP request from the outputs of its engine requests.

    ping: a part that a stream gets while the engine says nothing for long, if the protocol has one.
    """

    ping: ClassVar[Json | None] = None

    def __init__(self, service: Service, body: Body, *, prompts: int) -> None:
        self.service, self.body = service, body
        self.samples = samples_of(body, service.settings, prompts=prompts)
        self.n = self.samples.n
        self.created = int(time.time())
        self.id = ""
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0

    @abstractmethod
    async def requests(self, name: str) -> list[Request]:
        """Build the engine's requests, and set the answer's id, which contains `name`."""

    @abstractmethod
    def take(self, which: int, output: RequestOutput) -> list[Json]:
        """Convert one output of the engine into parts of the answer (possibly none)."""

    @abstractmethod
    def stream(self, first: Json, parts: AsyncIterator[Json]) -> EventStream:
        """Build the streamed answer."""

    @abstractmethod
    def whole(self, parts: list[Json]) -> Json:
        """Build the whole answer from all its parts."""

    async def respond(self, http: HttpRequest) -> Response:
        """Build the response, streamed or whole. A request that cannot be served gets an error status at once."""
        requests = await self.requests(http.state.request_id)
        parts = self._parts(requests, http)
        http.state.cleanup.append(parts.aclose)  # closed in any case, which aborts running requests
        if self.body.stream:
            if self.ping is not None:
                parts = with_pings(parts, self.ping)
                http.state.cleanup.append(parts.aclose)
            return self.stream(await anext(parts), parts)
        return reply(self.whole([part async for part in parts]))

    async def _parts(self, requests: Sequence[Request], http: HttpRequest) -> AsyncGenerator[Json]:
        """Yield the parts of the engine's outputs (`take`) as they arrive, and count and time them.

        The first output always yields some. Raises ApiError if the engine reports a failure.
        """
        metrics, which_of = self.service.metrics, {request.id: which for which, request in enumerate(requests)}
        self.stopwatch = Stopwatch(metrics, start=http.state.arrived)
        for request in requests:
            metrics.samples.observe(request.n)
            metrics.most.observe(request.params.max_new_tokens)
        begun: set[int] = set()
        try:
            async with aclosing(self.service.engine.generate(*requests)) as outputs:
                async for output in outputs:
                    which = which_of[output.request_id]
                    if which not in begun:
                        begun.add(which)
                        self.prompt_tokens += len(requests[which].prompt)
                        self.cached_tokens += output.cached_tokens
                        metrics.prompts.observe(len(requests[which].prompt))
                    self.completion_tokens += len(output.tokens)
                    self.stopwatch.observe(which, output.index, len(output.tokens), output.finish_reason)
                    check_end(requests[which], output)
                    for part in self.take(which, output):
                        yield part
        except SlowReader:
            raise ClientGone from None
        except HastenError as error:
            raise from_library(error) from None
        self.stopwatch.end()
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            http.state.facts[name] = getattr(self, name)


class ChoiceBuilder(AnswerBuilder[Body]):
    """An answer of OpenAI's with choices; one that is not streamed is its chunks joined.

    kind, chunk_kind: the `object` of a whole answer and of a chunk.
    """

    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: Body, *, prompts: int) -> None:
        super().__init__(service, body, prompts=prompts)
        options = body.stream_options or StreamOptions()
        self.usage_at_end, self.usage_always = options.include_usage, options.continuous_usage_stats
        if (self.usage_at_end or self.usage_always) and not body.stream:
            raise ApiError("stream_options needs stream", param="stream_options")
        self._unfinished = self.n * prompts  # choices of the stream

    @abstractmethod
    def join(self, index: int, parts: list[Json]) -> Json:
        """Join all chunk choices of one index into a whole choice, without its finish reason."""

    def stream(self, first: Json, parts: AsyncIterator[Json]) -> EventStream:
        return EventStream(self._chunks(first, parts))

    def whole(self, parts: list[Json]) -> Json:
        own: dict[int, list[Json]] = {}
        for part in parts:
            own.setdefault(part["index"], []).append(part)
        choices = [self.join(i, own[i]) | {"finish_reason": own[i][-1]["finish_reason"]} for i in sorted(own)]
        return self._envelope(self.kind, choices) | {"usage": self._usage()} | self._timings()

    def _timings(self) -> Json:
        """The field `timings`; none of ranked texts, whose first tokens are seen at the end."""
        if self.samples.ranked:
            return {}
        counts = self.prompt_tokens, self.cached_tokens, self.completion_tokens
        return {"timings": self.stopwatch.timings(*counts)}

    async def _chunks(self, first: Json, parts: AsyncIterator[Json]) -> AsyncIterator[Json]:
        async for part in after(first, parts):
            yield self._chunk(part)
        if self.usage_at_end:
            yield self._envelope(self.chunk_kind, []) | {"usage": self._usage()} | self._timings()

    def _chunk(self, part: Json) -> Json:
        chunk = self._envelope(self.chunk_kind, [part])
        if self.usage_at_end or self.usage_always:
            chunk["usage"] = self._usage() if self.usage_always else None
        self._unfinished -= part["finish_reason"] is not None
        if not self._unfinished and not self.usage_at_end:
            chunk |= self._timings()
        return chunk

    def _usage(self) -> Json:
        """The tokens used so far, as OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }


async def after(first: Json, parts: AsyncIterator[Json]) -> AsyncIterator[Json]:
    """The first part and the others."""
    yield first
    async for part in parts:
        yield part


async def with_pings(parts: AsyncGenerator[Json], ping: Json, *, seconds: float = PING) -> AsyncGenerator[Json]:
    """Yield the parts, and `ping` whenever none came for some seconds."""
    while True:
        waiting = asyncio.ensure_future(anext(parts, None))
        try:
            while not (await asyncio.wait({waiting}, timeout=seconds))[0]:
                yield ping
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})
        if (part := waiting.result()) is None:
            return
        yield part


def check_end(request: Request, output: RequestOutput) -> None:
    """Raise ApiError if an output ended with an error, violates its schema, or was aborted."""
    grammar = grammar_of(request.constraint)
    if grammar is not None and output.finish_reason in ("stop", "error"):
        why = grammar.error or str(output.stop_reason or "")
        if grammar.error or why.startswith("the constraint"):  # the client's grammar broke, not the engine
            message = f"{grammar.param}: the JSON schema could not be followed to the end: {why}"
            raise ApiError(message[:500], param=grammar.param, code="structure_failed")
    if output.finish_reason == "error" and request.beam_width:  # a healthy engine's beam search has no other error
        raise ApiError(f"n: {output.stop_reason}", param="n", code="too_few_texts")
    if output.finish_reason == "error":
        raise ApiError(f"the request failed: {output.stop_reason}", status=500, code="engine_failed")
    if output.finish_reason == "abort":
        raise overloaded("the request was aborted: the server is shutting down", seconds=5)


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice or chunk."""
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(t) for t in token.top]} for token in tokens],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprob | None], *, texts: Sequence[str], offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion choice or chunk. texts: text of each token; offset: characters before the first.

    None for the first token of a prompt, which nothing predicts.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": [None if token is None else max(token.logprob, LOWEST) for token in tokens],
        "top_logprobs": [None if token is None else _top(token) for token in tokens],
        "text_offset": offsets,
    }


def join_logprobs(empty: Json, parts: Iterable[Json]) -> Json:
    """Append the `logprobs` of chunk choices to those of a whole choice, which are empty so far."""
    for found in (part["logprobs"] for part in parts if part["logprobs"] is not None):
        for name, values in found.items():
            if isinstance(values, list):
                empty[name] += values
    return empty


def _top(token: TokenLogprob) -> dict[str, float]:
    """Log-probabilities by token text, the best for each text; the sampled token is always included."""
    found = {token.text: max(token.logprob, LOWEST)}
    for other in token.top:
        found[other.text] = max(found.get(other.text, LOWEST), other.logprob, LOWEST)
    return found


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LOWEST), "bytes": list(token.raw)}


class Stopwatch:
    """Observes the times of one request. Samples of one prompt share the time to the first token.

    start: when the request's headers arrived, by time.perf_counter().
    """

    def __init__(self, metrics: Metrics, *, start: float) -> None:
        self._metrics = metrics
        self._start = start
        self._first: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._tokens: dict[tuple[int, int], int] = {}

    def observe(self, prompt: int, index: int, tokens: int, finish_reason: str | None) -> None:
        """Count one output with `tokens` new tokens."""
        now, key = time.perf_counter(), (prompt, index)
        if tokens:
            if not self._first:
                self._metrics.first.observe(now - self._start)
            if key in self._last:
                self._metrics.between.observe(now - self._last[key])
            self._first.setdefault(key, now)
            self._last[key] = now
            self._tokens[key] = self._tokens.get(key, 0) + tokens
        if finish_reason is not None:
            count = self._tokens.get(key, 0)
            self._metrics.answers.observe(count)
            self._metrics.finished.labels(self._metrics.model_name, finish_reason).inc()
            if count > max(1, tokens):  # not all at once
                self._metrics.each.observe((now - self._first[key]) / (count - 1))

    def timings(self, prompt: int, cached: int, answered: int) -> Json:
        """Times in llama.cpp's fields, from these counts of tokens; of several choices, together."""
        first = min(self._first.values(), default=self._start)
        prompt_ms, answer_ms = 1000 * (first - self._start), 1000 * (max(self._last.values(), default=first) - first)
        computed = prompt - cached
        return {
            "cache_n": cached,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, computed),
            "prompt_per_second": computed * 1000 / prompt_ms if prompt_ms else 0.0,
            "predicted_n": answered,
            "predicted_ms": answer_ms,
            "predicted_per_token_ms": answer_ms / max(1, answered),
            "predicted_per_second": answered * 1000 / answer_ms if answer_ms else 0.0,
        }

    def end(self) -> None:
        """Observe the whole time, once the last output was sent."""
        self._metrics.whole.observe(time.perf_counter() - self._start)


def reply(body: Any) -> Response:
    """A JSON response; NaN and infinity become null."""
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")


class EventStream(Response):
    """Streams chunks as events. A failure after the first one is sent as an event, since the status is already sent.
    Another form of stream is a subclass with its own `encode` and `end`.

    named: each event has the name that its chunk gives as its `type`, and nothing marks the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Json],
        *,
        named: bool = False,
        failure: Callable[[ApiError], Json] = ApiError.body,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks, self._named, self._failure = chunks, named, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.chunks:
                await self._send_chunk(send, chunk)
        except ApiError as error:
            await self._send_chunk(send, self._failure(error))
        except ClientGone:
            raise
        except Exception as error:
            fields = {"request_id": scope["state"]["request_id"]}
            logging.getLogger(LOGGER).error("failed", exc_info=error, extra={"fields": fields})
            failed = ApiError("the server failed at this request", status=500, code="internal_error")
            await self._send_chunk(send, self._failure(failed))
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    @property
    def end(self) -> bytes:
        """The last bytes."""
        return b"" if self._named else b"data: [DONE]\n\n"

    def encode(self, chunk: Json) -> bytes:
        """The bytes of one chunk."""
        name = f"event: {chunk['type']}\n".encode() if self._named else b""
        return name + b"data: " + to_json(chunk, inf_nan_mode="null") + b"\n\n"

    async def _send_chunk(self, send: Send, chunk: Json) -> None:
        await send({"type": "http.response.body", "body": self.encode(chunk), "more_body": True})
