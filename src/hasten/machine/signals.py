"""Signals: SIGINT and SIGTERM for programs that finish something first, and one that comes when a parent ends."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

CAPTURED = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def capture_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` for both signals during the block. Works in the main thread; in others nothing is caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in CAPTURED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get a signal when the one that started it ends, however that happens (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
