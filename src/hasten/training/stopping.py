"""Ctrl-C and SIGTERM: the first asks the run to save and end, the second ends it at once."""

import signal
from contextlib import AbstractContextManager
from types import FrameType

from hasten.machine.signals import CAPTURED, capture_signals


class StopRequest:
    """`asked()` is whether a signal came; `signal` which one."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def asked(self) -> bool:
        return self.signal is not None


def stop_on_signals(request: StopRequest) -> AbstractContextManager[None]:
    """Note SIGINT and SIGTERM in `request` inside the block. Only the main thread can; elsewhere nothing is caught."""

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for caught in CAPTURED:
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)

    return capture_signals(handle)
