"""The engine behind asyncio: one thread runs its steps, any number of coroutines ask and read.

The two sides meet in an inbox (requests, aborts and other calls, taken in before each step) and, for each request, a
bounded list of pieces, delivered once a step. What can be refused is refused at once, without waiting for a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hasten.serving.counting import Stats
from hasten.serving.engine_thread import EngineThread, Sink
from hasten.serving.request import DeadlineExceeded, EngineFailed, Request, RequestOutput, SlowReader

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.serving.engine import Engine


class _Stream:
    """The unread pieces of one request, on the event loop's side."""

    def __init__(self, request: Request, limit: int) -> None:
        self.open, self.limit = set(range(request.n)), limit
        self.pieces: deque[RequestOutput] = deque()
        self.news = asyncio.Event()
        self.overrun = False

    def put(self, piece: RequestOutput) -> None:
        if len(self.pieces) >= self.limit:
            self.overrun = True
        else:
            self.pieces.append(piece)
        self.news.set()


class AsyncEngine:
    """An engine for coroutines. Make it in any thread; use it from event loops. sinks: see `EngineThread`."""

    def __init__(self, engine: Engine, *, sinks: Mapping[str, tuple[int, Sink]] | None = None) -> None:
        self.engine = engine
        self.thread = EngineThread(engine, sinks=sinks)
        self.thread.after_step.append(self._deliver)
        self._ready: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        self._draining = False
        self._open = 0

    @property
    def healthy(self) -> bool:
        return self.engine.error is None and self.thread.alive

    @property
    def error(self) -> str | None:
        """Why it is not healthy."""
        return self.engine.error or (None if self.thread.alive else "the engine was closed")

    def stats(self) -> Stats:
        return self.engine.stats()

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The pieces of a request as they come. Closing the iterator aborts it: its blocks are free after the step.

        Raises RequestRefused or QueueFull before anything is computed, DeadlineExceeded after its timeout, EngineFailed
        when a step failed, SlowReader when too many pieces lay unread.
        """
        self._check_open()
        self.engine.checked(request)
        stream = _Stream(request, self.engine.settings.reader_limit)
        loop = asyncio.get_running_loop()

        def sink(piece: RequestOutput) -> None:
            self._ready.setdefault(loop, []).append((stream, piece))

        self.thread.submit(request, sink)
        self._open += 1
        try:
            while stream.open:
                await stream.news.wait()
                stream.news.clear()
                while stream.pieces:
                    piece = stream.pieces.popleft()
                    self._raise_for(piece, request)
                    if piece.finish_reason is not None:
                        stream.open.discard(piece.index)
                    yield piece
                if stream.overrun:
                    raise SlowReader(
                        f"{stream.limit} pieces of request {request.id} lay unread; the request was aborted"
                    )
        finally:
            self._open -= 1
            if stream.open:
                self.thread.abort(request.id, sink)

    async def embed(
        self, prompts: Sequence[Sequence[int]], *, pooling: str = "mean", timeout: float | None = None
    ) -> Tensor:
        """States (P, C) float32 of the prompts, see `Engine.embed`; one prompt, read whole, between two steps.

        They have one place in the queue, until the last is done. timeout: seconds for all of them. Raises
        RequestRefused, QueueFull, EngineFailed, DeadlineExceeded.
        """
        import torch

        self._check_open()
        self.thread.enter()
        self._open += 1
        try:
            async with asyncio.timeout(timeout):
                found = [await self._in_thread(partial(self.engine.embed, one, pooling=pooling)) for one in prompts]
        except TimeoutError:
            message = f"the embeddings of {len(prompts)} texts were not complete after {timeout} seconds"
            raise DeadlineExceeded(message) from None
        finally:
            self._open -= 1
            self.thread.leave()
        return torch.stack(found)

    async def drain(self, timeout: float) -> bool:
        """For users of the engine in their own process: take nothing new and wait until everybody is served.

        Whether that was in time (in seconds).
        """
        self._draining = True
        end = asyncio.get_running_loop().time() + timeout
        while not self.engine.idle or self._open:
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        """Abort what is left and end the thread."""
        self._draining = True
        await asyncio.to_thread(self.thread.close)

    def _check_open(self) -> None:
        if not self.healthy:
            raise EngineFailed(f"the engine takes no requests: {self.error}")
        if self._draining:
            raise EngineFailed("the engine is shutting down and takes no requests")

    def _raise_for(self, piece: RequestOutput, request: Request) -> None:
        if piece.finish_reason == "abort" and piece.stop_reason == "timeout":
            raise DeadlineExceeded(f"request {request.id} was not complete after {request.timeout} seconds")
        if piece.finish_reason == "error" and self.engine.error is not None:
            raise EngineFailed(f"the engine failed while request {request.id} was served: {self.engine.error}")

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            if future.cancelled():  # whoever asked has gone
                return
            try:
                if self.thread.ended or self.engine.error is not None:
                    raise EngineFailed(f"the engine takes no requests: {self.error}")
                found, failed = function(), None
            except Exception as error:
                found, failed = None, error
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(settle, found, failed)

        self.thread.call(run)
        return await future

    def _deliver(self) -> None:
        """In the engine's thread: one call into each loop for all pieces of a step."""
        ready, self._ready = self._ready, {}
        for loop, news in ready.items():
            try:
                loop.call_soon_threadsafe(_put_all, news)
            except RuntimeError:  # the loop was closed: nobody reads any more
                for _, piece in news:
                    self.thread.abort(piece.request_id)


def _put_all(news: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, piece in news:
        stream.put(piece)
