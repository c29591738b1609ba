"""How long a call takes."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: Mapping[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each call in so many rounds, all of them in turn; a round before them warms up."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            seconds = timed(call)
            if number:
                times[key].append(seconds)
    return times


def timed_warm(call: Callable[[], object], seconds: float = 0.05) -> float:
    """Seconds of a call, the mean over `seconds`, after one that finds what is cold and wakes the threads."""
    call()
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < seconds:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls
