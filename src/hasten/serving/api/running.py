"""Running requests in the engine: several as one stream of pieces, every failure as what a client may be told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from fastapi import Request as HttpRequest

from hasten.errors import HastenError
from hasten.serving.api.errors import ApiError, ClientGone, overloaded
from hasten.serving.api.grammar import Grammar
from hasten.serving.api.metrics import Stopwatch
from hasten.serving.api.service import Service
from hasten.serving.request import (
    DeadlineExceeded,
    EngineFailed,
    QueueFull,
    Request,
    RequestOutput,
    RequestRefused,
    SlowReader,
)


class RequestRun:
    """The pieces of all engine requests of one HTTP request, in the order in which they come: (which, piece).

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
        self._pieces = self._one(0) if len(requests) == 1 else self._several()
        http.state.cleanup.append(self.aclose)
        for request in requests:
            service.metrics.samples.observe(request.n)
            service.metrics.most.observe(request.params.max_new_tokens)

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        try:
            which, piece = await anext(self._pieces)
        except StopAsyncIteration:
            self.stopwatch.end()
            self._note()
            raise
        except SlowReader:
            raise ClientGone from None
        except HastenError as error:
            raise told(error) from None
        self._count(which, piece)
        constraint = self.requests[which].constraint
        if isinstance(constraint, Grammar) and piece.finish_reason in ("stop", "error"):
            why = constraint.error or str(piece.stop_reason or "")
            if constraint.error or why.startswith("the constraint"):  # the client's grammar broke, not the engine
                message = f"{constraint.param}: the JSON schema could not be followed to the end: {why}"
                raise ApiError(message[:500], param=constraint.param, code="structure_failed")
        if piece.finish_reason in ("error", "abort"):
            raise _ended(piece)
        return which, piece

    async def aclose(self) -> None:
        """Abort whatever still runs."""
        with suppress(RuntimeError):
            await self._pieces.aclose()  # type: ignore[attr-defined]

    def usage(self) -> dict[str, object]:
        """OpenAI's account of the tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _count(self, which: int, piece: RequestOutput) -> None:
        if which not in self._counted:
            self._counted.add(which)
            self.prompt_tokens += len(self.requests[which].prompt)
            self.cached_tokens += piece.cached_tokens
            self.service.metrics.prompts.observe(len(self.requests[which].prompt))
        self.completion_tokens += len(piece.tokens)
        self.stopwatch.piece(which, piece.index, len(piece.tokens), piece.finish_reason)

    def _note(self) -> None:
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        self._facts.update({name: getattr(self, name) for name in names})

    async def _one(self, which: int) -> AsyncIterator[tuple[int, RequestOutput]]:
        pieces = self.service.engine.generate(self.requests[which])
        try:
            async for piece in pieces:
                yield which, piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    async def _several(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """All at once; the first failure ends them all."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(64)

        async def feed(which: int) -> None:
            end: Exception | None = None
            try:
                async for item in self._one(which):
                    await queue.put(item)
            except Exception as error:  # whatever it is: somebody waits to hear of it
                end = error
            await queue.put(end)

        tasks = [asyncio.create_task(feed(which)) for which in range(len(self.requests))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def told(error: HastenError) -> ApiError:
    """What a client is told of an error of the library."""
    if isinstance(error, QueueFull):
        return overloaded(str(error), seconds=error.retry_after, status=429)
    if isinstance(error, RequestRefused):
        return ApiError(str(error), param=error.field, code="request_refused")
    if isinstance(error, DeadlineExceeded):
        return ApiError(str(error), status=504, code="deadline_exceeded")
    if isinstance(error, EngineFailed):
        return ApiError(str(error), status=500, code="engine_failed")
    return ApiError(str(error))


def _ended(piece: RequestOutput) -> ApiError:
    if piece.finish_reason == "error":
        return ApiError(f"the request failed: {piece.stop_reason}", status=500, code="engine_failed")
    if piece.stop_reason == "timeout":
        return ApiError("the request's deadline passed", status=504, code="deadline_exceeded")
    return overloaded("the request was aborted: the server is shutting down", seconds=5)
