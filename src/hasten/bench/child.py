"""The parent's side of one measuring process: start it, ask it, notice when it dies, end it."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from types import TracebackType
from typing import TypeVar

from hasten.bench.worker import Failed, Measured, Ready, Task, serve

Answer = TypeVar("Answer", Ready, Measured)


class ChildError(Exception):
    """The child failed: `message` in one line, and the child's own traceback if it raised something unforeseen."""

    def __init__(self, message: str, child_traceback: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.child_traceback = child_traceback


class Child:
    """One measuring process; use it as a context manager or call close().

    Every wait raises ChildError when the child failed, was killed, or took longer than `timeout` seconds.
    """

    def __init__(self, task: Task, *, timeout: float) -> None:
        # spawn: a forked child would share the parent's threads, memory and CUDA state
        context = multiprocessing.get_context("spawn")
        self.timeout = timeout
        self._connection, theirs = context.Pipe()
        # Not a daemon: daemons may have no children, and rungs compile and load data in processes.
        self._process = context.Process(target=serve, args=(theirs, task), name="hasten rung")
        self._process.start()
        theirs.close()  # else the end of the child would not be noticed

    def wait_ready(self) -> Ready:
        """Waits until the child has set up."""
        return self._receive(Ready)

    def measure(self) -> Measured:
        """Has the child measure once."""
        try:
            self._connection.send("measure")
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None
        return self._receive(Measured)

    def close(self) -> None:
        """Ends the child: politely first, so that it can end its own helpers, then by force. Can be called twice."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._connection.send("stop")
        self._connection.close()
        self._process.join(2)
        for force in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                force()
                self._process.join(5)

    def abort(self) -> None:
        """Ends the child at once, in the middle of whatever it does."""
        if self._process.is_alive():
            self._process.terminate()
        self.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _receive(self, expected: type[Answer]) -> Answer:
        try:
            if not self._connection.poll(self.timeout):
                raise ChildError(f"no answer within {self.timeout:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ChildError(self._last_words()) from None
        if isinstance(answer, Failed):
            raise ChildError(answer.message, answer.traceback)
        assert isinstance(answer, expected), answer
        return answer

    def _last_words(self) -> str:
        self._process.join(10)
        status = self._process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            hint = ", most likely because the memory ran out" if -status == getattr(signal, "SIGKILL", 9) else ""
            return f"the process was killed ({name}){hint}"
        return f"the process ended by itself with exit status {status}"
