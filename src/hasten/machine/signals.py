"""Handles SIGINT (Ctrl-C) and SIGTERM for programs that finish something first: a training run, a server."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

CAPTURED = (signal.SIGINT, signal.SIGTERM)


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
