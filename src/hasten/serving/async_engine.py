"""The engine behind asyncio: one thread runs its steps, any number of coroutines ask and read.

The two sides meet in an inbox (requests, aborts and other calls, taken in before each step) and, for each request, a
bounded list of pieces, delivered once a step. What can be refused is refused at once, without waiting for a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hasten.serving.request import DeadlineExceeded, EngineFailed, Piece, Request, SlowReader
from hasten.serving.settings import Stats

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.serving.engine import Engine

# A reader of one request gets its pieces through this; it is called in the engine's thread.
Sink = Callable[[Piece], None]


class EngineThread:
    """Runs an engine's steps in a thread of its own while there is something to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.after_step: list[Callable[[], None]] = []  # called in the thread when a step's pieces were given out
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._sinks: dict[str, Sink] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hasten-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def call(self, function: Callable[[], None]) -> None:
        """Have it called by the engine's thread, between two steps."""
        with self._wake:
            self._inbox.append(function)
            self._wake.notify()

    def submit(self, request: Request, sink: Sink) -> None:
        """Add a request; its pieces, an error's too, go to `sink`."""

        def add() -> None:
            try:
                self.engine.add(request)
                self._sinks[request.id] = sink
            except Exception as error:
                for index in range(request.n):
                    sink(Piece(request_id=request.id, index=index, finish_reason="error", stop_reason=str(error)))

        self.call(add)

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """Give a request up; with `sink`, only if it is the one that reads it."""

        def abort() -> None:
            if sink is None or self._sinks.get(request_id) is sink:
                self._sinks.pop(request_id, None)
                self.engine.abort(request_id)

        self.call(abort)

    @property
    def waiting(self) -> int:
        """Requests that wait, those in the inbox included."""
        return len(self.engine.scheduler.waiting) + len(self._inbox)

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after the current step; whoever is still served gets an abort."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a mistake of ours outside a step: nobody may wait for an answer for ever
            self.engine.error = self.engine.error or f"{type(error).__name__}: {error}"
            for request_id in list(self._sinks):
                self.engine.abort(request_id)
                self._sinks[request_id](Piece(request_id=request_id, index=0, finish_reason="error"))
            for hook in self.after_step:
                hook()
            raise

    def _serve(self) -> None:
        engine = self.engine
        while True:
            with self._wake:
                while engine.idle and not self._inbox and not self._closing:
                    self._wake.wait()
            while self._inbox:
                self._inbox.popleft()()
            if self._closing:
                break
            if not engine.idle:
                self._give_out(engine.step())
        for request_id in list(self._sinks):
            engine.abort(request_id)
        self._give_out(engine.step())

    def _give_out(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            sink = self._sinks.get(piece.request_id)
            if sink is not None:
                sink(piece)
        for hook in self.after_step:
            hook()


class _Stream:
    """The unread pieces of one request, on the event loop's side."""

    def __init__(self, request: Request, limit: int) -> None:
        self.open, self.limit = set(range(request.n)), limit
        self.pieces: deque[Piece] = deque()
        self.news = asyncio.Event()
        self.overrun = False

    def put(self, piece: Piece) -> None:
        if len(self.pieces) >= self.limit:
            self.overrun = True
        else:
            self.pieces.append(piece)
        self.news.set()


class AsyncEngine:
    """An engine for coroutines. Make it in any thread; use it from event loops."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.thread = EngineThread(engine)
        self.thread.after_step.append(self._deliver)
        self._ready: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Piece]]] = {}
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

    async def generate(self, request: Request) -> AsyncIterator[Piece]:
        """The pieces of a request as they come. Closing the iterator aborts it: its blocks are free after the step.

        Raises RequestRefused or QueueFull before anything is computed, DeadlineExceeded after its timeout, EngineFailed
        when a step failed, SlowReader when too many pieces lay unread.
        """
        self._admit(request)
        stream = _Stream(request, self.engine.settings.reader_limit)
        loop = asyncio.get_running_loop()

        def sink(piece: Piece) -> None:
            self._ready.setdefault(loop, []).append((stream, piece))

        self._open += 1
        self.thread.submit(request, sink)
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
            self.thread.abort(request.id, sink)  # nothing, if it is complete

    async def embed(self, prompts: Sequence[Sequence[int]], *, pooling: str = "mean") -> Tensor:
        """States (P, C) float32 of the prompts, see `Engine.embed`; one prompt between two steps at a time."""
        import torch

        found = [await self._in_thread(partial(self.engine.embed, prompt, pooling=pooling)) for prompt in prompts]
        return torch.stack(found)

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait until everybody is served; whether that was in time (in seconds)."""
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

    def _admit(self, request: Request) -> None:
        if not self.healthy:
            raise EngineFailed(f"the engine takes no requests: {self.error}")
        if self._draining:
            raise EngineFailed("the engine is shutting down and takes no requests")
        self.engine.check_room(self.thread.waiting)
        self.engine.checked(request)

    def _raise_for(self, piece: Piece, request: Request) -> None:
        if piece.finish_reason == "abort" and piece.stop_reason == "timeout":
            raise DeadlineExceeded(f"request {request.id} was not complete after {request.timeout} seconds")
        if piece.finish_reason == "error" and self.engine.error is not None:
            raise EngineFailed(f"the engine failed while request {request.id} was served: {self.engine.error}")

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        if not self.healthy:
            raise EngineFailed(f"the engine takes no requests: {self.error}")
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
            try:
                found, failed = function(), None
            except Exception as error:
                found, failed = None, error
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


def _put_all(news: list[tuple[_Stream, Piece]]) -> None:
    for stream, piece in news:
        stream.put(piece)
