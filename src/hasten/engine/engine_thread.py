"""A thread that runs an engine's steps while there is something to do, and what is handed to it from others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from hasten.engine.request import EngineFailed, Request, RequestOutput

if TYPE_CHECKING:
    from hasten.engine.engine import Engine

Result = TypeVar("Result")

# Called in the engine's thread with a reader's outputs of a step, or with the reason why its request was not taken.
# Once a step for all requests that share it: waking a reader for each output takes the interpreter from the engine.
Sink = Callable[[list[RequestOutput | Exception]], None]


class EngineThread:
    """Runs an engine's steps in a thread of its own. What other threads ask lies in an inbox until the next step.

    after_step: called in the thread when sinks were.
    """

    def __init__(self, engine: Engine, *, after_step: Callable[[], None]) -> None:
        self.engine, self._after_step = engine, after_step
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._readers: dict[str, Sink] = {}
        self._coming = 0  # places of the queue that are taken by what the engine does not know of
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="hasten-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

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

    def ask(self, function: Callable[[], Result], answer: Future[Result] | None = None) -> Future[Result]:
        """`call` with a result, in a new future or `answer`. Not called if that was cancelled. Raises EngineFailed."""
        future: Future[Result] = Future() if answer is None else answer

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self.call(run)
        return future

    def enter(self, places: int = 1) -> None:
        """Take places in the queue, to be given back by `leave`: all of them, or none.

        The only place where it is decided whether there is room: a request that was let in here is not sent away later.
        Raises QueueFull, or RequestRefused where there will never be as many places.
        """
        with self._wake:
            self.engine.check_room(self.waiting, more=places)
            self._coming += places

    def leave(self, places: int = 1) -> None:
        """Give places back."""
        with self._wake:
            self._coming -= places

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Add requests that `Engine.admit` made: all of them, or none.

        `sink` gets their outputs, or the error for which one is not taken after all. Raises QueueFull, RequestRefused,
        EngineFailed.
        """

        def add() -> None:
            self.leave(len(requests))
            try:
                for request in requests:
                    self.engine.enqueue(request)
                    self._readers[request.id] = sink
            except Exception as error:
                sink([error])

        self.enter(len(requests))
        try:
            self.call(add)
        except EngineFailed:
            self.leave(len(requests))
            raise

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """Give a request up; with `sink`, only if it is the one that reads it."""

        def abort() -> None:
            if sink is None or self._readers.get(request_id) is sink:
                self._readers.pop(request_id, None)
                self.engine.abort(request_id)

        with suppress(EngineFailed):
            self.call(abort)

    def close(self, timeout: float = 60.0) -> None:
        """End the thread, and the engine, after the current step; whoever is still served gets an abort.

        May be called again.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a mistake of ours outside a step: nobody may wait for an answer for ever
            self._give_out(self.engine.fail(error))
            raise
        finally:
            with self._wake:
                self._ended = True
            while self._inbox:  # the engine tells those who came too late
                self._inbox.popleft()()
            self._after_step()

    def _serve(self) -> None:
        engine = self.engine
        while True:
            while engine.idle and not self._inbox and not self._closing and engine.warm_up():
                pass
            with self._wake:
                while engine.idle and not self._inbox and not self._closing:
                    self._wake.wait()
            while self._inbox:
                self._inbox.popleft()()
            self._after_step()  # who was not taken need not wait for a step to hear of it
            if self._closing:
                break
            if not engine.idle:
                self._give_out(engine.step())
        for request_id in list(self._readers):
            engine.abort(request_id)
        self._give_out(engine.step())
        engine.close()

    def _give_out(self, outputs: list[RequestOutput]) -> None:
        news: dict[Sink, list[RequestOutput | Exception]] = {}
        for output in outputs:
            sink = self._readers.get(output.request_id)
            if sink is not None:
                if output.finished:
                    del self._readers[output.request_id]
                news.setdefault(sink, []).append(output)
        for sink, own in news.items():
            sink(own)
        self._after_step()
