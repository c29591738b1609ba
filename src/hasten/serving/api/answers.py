"""Answers: the engine's outputs of one HTTP request as OpenAI's chunks, and whole answers as chunks put together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from hasten.errors import HastenError
from hasten.serving.api.build_request import samples, usage_wanted
from hasten.serving.api.fields import SamplingBody
from hasten.serving.api.metrics import Stopwatch
from hasten.serving.api.responses import ApiError, ClientGone, EventStream, from_library, overloaded, reply
from hasten.serving.api.service import Service
from hasten.serving.api.structured import Grammar
from hasten.serving.request import Request, RequestOutput, SlowReader, TokenLogprob

Body = TypeVar("Body", bound=SamplingBody)
Json = dict[str, Any]
LOWEST = -9999.0  # what stands for minus infinity, which JSON does not have (vLLM's value)


class AnswerBuilder(ABC, Generic[Body]):
    """What becomes of one HTTP request. Its choices are told as those of chunks; a whole choice is its chunks joined.

    kind, chunk_kind: the `object` of a whole answer and of a chunk.
    """

    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: Body, *, prompts: int) -> None:
        self.service, self.body = service, body
        self.n, self.best_of = samples(body, service.settings, prompts=prompts)
        self.usage, self.always = usage_wanted(body)
        self.created = int(time.time())
        self.id = ""

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
        """The response, streamed or whole. What cannot be served is told by its status, before anything is sent."""
        run = RequestRun(self.service, http, await self.requests(http.state.request_id))
        first = await anext(run)
        if self.body.stream:
            return EventStream(self._chunks(first, run))
        parts: dict[int, list[Json]] = {index: [] for index in range(self.n * len(run.requests))}
        async for part in self._parts(first, run):
            parts[part["index"]].append(part)
        choices = [self.join(i, own) | {"finish_reason": own[-1]["finish_reason"]} for i, own in parts.items()]
        return reply(self._envelope(self.kind, choices) | {"usage": run.usage()})

    async def _parts(self, first: tuple[int, RequestOutput], run: RequestRun) -> AsyncIterator[Json]:
        for part in self.take(*first):
            yield part
        async for item in run:
            for part in self.take(*item):
                yield part

    async def _chunks(self, first: tuple[int, RequestOutput], run: RequestRun) -> AsyncIterator[Json]:
        async for part in self._parts(first, run):
            chunk = self._envelope(self.chunk_kind, [part])
            if self.usage or self.always:
                chunk["usage"] = run.usage() if self.always else None
            yield chunk
        if self.usage:
            yield self._envelope(self.chunk_kind, []) | {"usage": run.usage()}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }


class RequestRun:
    """The outputs of all engine requests of one HTTP request, in the order in which they come: (which, output).

    What is still running is aborted by `aclose`, which the guard calls whatever happened.
    """

    def __init__(self, service: Service, http: HttpRequest, requests: Sequence[Request]) -> None:
        if not service.engine.healthy:
            raise overloaded(f"the engine has failed: {service.engine.error}", seconds=30)
        self.service, self.requests = service, requests
        self.stopwatch = Stopwatch(service.metrics, start=http.state.arrived)
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self._counted: set[int] = set()
        self._facts = http.state.facts
        self._which = {request.id: which for which, request in enumerate(requests)}
        self._outputs = service.engine.generate(*requests)
        http.state.cleanup.append(self.aclose)
        for request in requests:
            service.metrics.samples.observe(request.n)
            service.metrics.most.observe(request.params.max_new_tokens)

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        try:
            output = await anext(self._outputs)
        except StopAsyncIteration:
            self.stopwatch.end()
            names = ("prompt_tokens", "completion_tokens", "cached_tokens")
            self._facts.update({name: getattr(self, name) for name in names})
            raise
        except SlowReader:
            raise ClientGone from None
        except HastenError as error:
            raise from_library(error) from None
        which = self._which[output.request_id]
        self._count(which, output)
        constraint = self.requests[which].constraint
        if isinstance(constraint, Grammar) and output.finish_reason in ("stop", "error"):
            why = constraint.error or str(output.stop_reason or "")
            if constraint.error or why.startswith("the constraint"):  # the client's grammar broke, not the engine
                message = f"{constraint.param}: the JSON schema could not be followed to the end: {why}"
                raise ApiError(message[:500], param=constraint.param, code="structure_failed")
        if output.finish_reason in ("error", "abort"):
            raise _ended(output)
        return which, output

    async def aclose(self) -> None:
        """Abort whatever still runs."""
        with suppress(RuntimeError):
            await self._outputs.aclose()

    def usage(self) -> dict[str, object]:
        """OpenAI's account of the tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _count(self, which: int, output: RequestOutput) -> None:
        if which not in self._counted:
            self._counted.add(which)
            self.prompt_tokens += len(self.requests[which].prompt)
            self.cached_tokens += output.cached_tokens
            self.service.metrics.prompts.observe(len(self.requests[which].prompt))
        self.completion_tokens += len(output.tokens)
        self.stopwatch.observe(which, output.index, len(output.tokens), output.finish_reason)


def _ended(output: RequestOutput) -> ApiError:
    if output.finish_reason == "error":
        return ApiError(f"the request failed: {output.stop_reason}", status=500, code="engine_failed")
    if output.stop_reason == "timeout":
        return ApiError("the request's deadline passed", status=504, code="deadline_exceeded")
    return overloaded("the request was aborted: the server is shutting down", seconds=5)


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


def _top(token: TokenLogprob) -> dict[str, float]:
    """The most likely tokens by text; of tokens with the same text the most likely. The taken one is always there."""
    found = {token.text: max(token.logprob, LOWEST)}
    for other in token.top:
        found[other.text] = max(found.get(other.text, LOWEST), other.logprob, LOWEST)
    return found


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LOWEST), "bytes": list(token.raw)}
