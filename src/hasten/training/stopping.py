"""Ctrl-C and SIGTERM: the first asks the run to save and end, the second ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """`asked()` is whether a signal came; `signal` which one."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def asked(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals(request: StopRequest) -> Iterator[None]:
    """Note SIGINT and SIGTERM in `request` inside the block. Only the main thread can; elsewhere nothing is caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for caught in before:
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)

    try:
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            before[number] = signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
