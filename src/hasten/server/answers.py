"""Answers: the engine's outputs of one HTTP request as OpenAI's chunks, and whole answers as chunks put together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from hasten.engine.request import Request, RequestOutput, SlowReader, TokenLogprob
from hasten.errors import HastenError
from hasten.server.build_request import samples
from hasten.server.fields import SamplingBody, StreamOptions
from hasten.server.metrics import Stopwatch
from hasten.server.responses import ApiError, ClientGone, EventStream, from_library, overloaded, reply
from hasten.server.service import Service
from hasten.server.structured import Grammar

Body = TypeVar("Body", bound=SamplingBody)
Json = dict[str, Any]
LOWEST = -9999.0  # in place of minus infinity, which JSON does not have (vLLM's value)


class AnswerBuilder(ABC, Generic[Body]):
    """Builds the response of one HTTP request; an answer that is not streamed is its chunks joined.

    kind, chunk_kind: the `object` of a whole answer and of a chunk.
    """

    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: Body, *, prompts: int) -> None:
        self.service, self.body = service, body
        self.samples = samples(body, service.settings, prompts=prompts)
        self.n = self.samples["n"]
        options = body.stream_options or StreamOptions()
        self.usage_at_end, self.usage_always = options.include_usage, options.continuous_usage_stats
        if (self.usage_at_end or self.usage_always) and not body.stream:
            raise ApiError("stream_options needs stream", param="stream_options")
        self.created = int(time.time())
        self.id = ""
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0

    @abstractmethod
    async def requests(self, name: str) -> list[Request]:
        """What the engine is asked; sets the answer's id, in which `name` occurs."""

    @abstractmethod
    def take(self, which: int, output: RequestOutput) -> list[Json]:
        """What an output of one of the requests adds: choices of chunks, maybe none."""

    @abstractmethod
    def join(self, index: int, parts: list[Json]) -> Json:
        """A whole choice, without its finish reason, of all choices of chunks with its index."""

    async def respond(self, http: HttpRequest) -> Response:
        """The response, streamed or whole. A request that cannot be served gets an error status at once."""
        requests = await self.requests(http.state.request_id)
        parts = self._parts(requests, http)
        http.state.cleanup.append(parts.aclose)  # called whatever happens: what still runs is aborted
        first = await anext(parts)
        if self.body.stream:
            return EventStream(self._chunks(first, parts))
        own: dict[int, list[Json]] = {index: [] for index in range(self.n * len(requests))}
        own[first["index"]].append(first)
        async for part in parts:
            own[part["index"]].append(part)
        choices = [self.join(i, found) | {"finish_reason": found[-1]["finish_reason"]} for i, found in own.items()]
        return reply(self._envelope(self.kind, choices) | {"usage": self._usage()})

    async def _chunks(self, first: Json, parts: AsyncIterator[Json]) -> AsyncIterator[Json]:
        yield self._chunk(first)
        async for part in parts:
            yield self._chunk(part)
        if self.usage_at_end:
            yield self._envelope(self.chunk_kind, []) | {"usage": self._usage()}

    def _chunk(self, part: Json) -> Json:
        chunk = self._envelope(self.chunk_kind, [part])
        if self.usage_at_end or self.usage_always:
            chunk["usage"] = self._usage() if self.usage_always else None
        return chunk

    async def _parts(self, requests: Sequence[Request], http: HttpRequest) -> AsyncGenerator[Json]:
        """What the engine's outputs add (`take`), as they come; counts and times them. The first output adds something.

        Raises ApiError for what the engine says of a failure.
        """
        metrics, which_of = self.service.metrics, {request.id: which for which, request in enumerate(requests)}
        stopwatch = Stopwatch(metrics, start=http.state.arrived)
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
                    stopwatch.observe(which, output.index, len(output.tokens), output.finish_reason)
                    _check_end(requests[which], output)
                    for part in self.take(which, output):
                        yield part
        except SlowReader:
            raise ClientGone from None
        except HastenError as error:
            raise from_library(error) from None
        stopwatch.end()
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            http.state.facts[name] = getattr(self, name)

    def _usage(self) -> Json:
        """OpenAI's account of the tokens so far."""
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


def _check_end(request: Request, output: RequestOutput) -> None:
    """Raise ApiError where an output ends its text other than well."""
    constraint = request.constraint
    if isinstance(constraint, Grammar) and output.finish_reason in ("stop", "error"):
        why = constraint.error or str(output.stop_reason or "")
        if constraint.error or why.startswith("the constraint"):  # the client's grammar broke, not the engine
            message = f"{constraint.param}: the JSON schema could not be followed to the end: {why}"
            raise ApiError(message[:500], param=constraint.param, code="structure_failed")
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
    """The `logprobs` of a completion choice or chunk. texts: of each token; offset: characters before the first.

    None, at the first token of a prompt: nothing predicts it.
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
    """The `logprobs` of all choices of chunks in one, which is empty so far."""
    for found in (part["logprobs"] for part in parts if part["logprobs"] is not None):
        for name, values in found.items():
            if isinstance(values, list):
                empty[name] += values
    return empty


def _top(token: TokenLogprob) -> dict[str, float]:
    """The most likely tokens by text; of tokens with the same text the most likely. The taken one is always there."""
    found = {token.text: max(token.logprob, LOWEST)}
    for other in token.top:
        found[other.text] = max(found.get(other.text, LOWEST), other.logprob, LOWEST)
    return found


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LOWEST), "bytes": list(token.raw)}
