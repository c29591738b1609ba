"""A thread that runs an engine's steps while there is something to do, and what is handed to it from others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hasten.serving.request import EngineFailed, Request, RequestOutput

if TYPE_CHECKING:
    from hasten.serving.engine import Engine

# A reader of one request gets its pieces through this; it is called in the engine's thread.
Sink = Callable[[RequestOutput], None]


@dataclass(slots=True)
class _Reader:
    """A request's sink, and the texts of it that have not ended."""

    sink: Sink
    open: set[int]


class EngineThread:
    """Runs an engine's steps in a thread of its own. What other threads ask lies in an inbox until the next step.

    sinks: readers of requests that were added to the engine before: {id: (how many texts, sink)}.
    """

    def __init__(self, engine: Engine, *, sinks: Mapping[str, tuple[int, Sink]] | None = None) -> None:
        self.engine = engine
        self.after_step: list[Callable[[], None]] = []  # called in the thread when a step's pieces were given out
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._readers = {name: _Reader(sink, set(range(texts))) for name, (texts, sink) in (sinks or {}).items()}
        self._coming = 0  # places of the queue that are taken by what the engine does not know of
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="hasten-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def ended(self) -> bool:
        """Whether nothing that is handed in now will be done."""
        return self._ended

    @property
    def waiting(self) -> int:
        """Requests that have not begun, those that the engine has not heard of included."""
        return self.engine.waiting + self._coming

    def call(self, function: Callable[[], None]) -> None:
        """Have it called by the engine's thread, between two steps. Raises EngineFailed when the thread has ended."""
        with self._wake:
            if self._ended:
                raise EngineFailed("the engine was closed")
            self._inbox.append(function)
            self._wake.notify()

    def enter(self) -> None:
        """Take a place in the queue, to be given back by `leave`. Raises QueueFull.

        The only place where it is decided whether there is room: a request that was let in here is not sent away later.
        """
        with self._wake:
            self.engine.check_room(self.waiting)
            self._coming += 1

    def leave(self) -> None:
        """Give a place back."""
        with self._wake:
            self._coming -= 1

    def submit(self, request: Request, sink: Sink) -> None:
        """Add a request; its pieces, an error's too, go to `sink`. Raises QueueFull, EngineFailed."""

        def add() -> None:
            self.leave()
            try:
                if self._ended:
                    raise EngineFailed(self.engine.error or "the engine was closed")
                self.engine.add(request, room=True)
                self._readers[request.id] = _Reader(sink, set(range(request.n)))
            except Exception as error:
                for index in range(request.n):
                    sink(
                        RequestOutput(request_id=request.id, index=index, finish_reason="error", stop_reason=str(error))
                    )

        self.enter()
        try:
            self.call(add)
        except EngineFailed:
            self.leave()
            raise

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """Give a request up; with `sink`, only if it is the one that reads it."""

        def abort() -> None:
            reader = self._readers.get(request_id)
            if sink is None or (reader is not None and reader.sink is sink):
                self._readers.pop(request_id, None)
                self.engine.abort(request_id)

        if not self._ended:
            with self._wake:
                self._inbox.append(abort)
                self._wake.notify()

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after the current step; whoever is still served gets an abort. May be called again."""
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
            for request_id, reader in list(self._readers.items()):
                self.engine.abort(request_id)
                reader.sink(RequestOutput(request_id=request_id, index=0, finish_reason="error"))
            raise
        finally:
            with self._wake:
                self._ended = True
            while self._inbox:  # those who came too late are told so
                self._inbox.popleft()()
            self._hooks()

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
        for request_id in list(self._readers):
            engine.abort(request_id)
        self._give_out(engine.step())

    def _give_out(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            reader = self._readers.get(piece.request_id)
            if reader is None:
                continue
            reader.sink(piece)
            if piece.finish_reason is not None:
                reader.open.discard(piece.index)
                if not reader.open:
                    del self._readers[piece.request_id]
        self._hooks()

    def _hooks(self) -> None:
        for hook in self.after_step:
            hook()
