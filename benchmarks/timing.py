"""How long a call takes."""

import time
from collections.abc import Callable


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_warm(call: Callable[[], object], seconds: float = 0.05) -> float:
    """Seconds of a call, the mean over `seconds`, after one that finds what is cold and wakes the threads."""
    call()
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < seconds:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls
