"""How long calls take: one call, and several that take turns."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: Mapping[Key, Callable[[], object]], rounds: int, *, warmup: int = 1) -> dict[Key, list[float]]:
    """Seconds of each call in each of `rounds` rounds; all calls take turns. The warm-up rounds are not counted."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for number in range(warmup + rounds):
        for key, call in calls.items():
            seconds = timed(call)
            if number >= warmup:
                times[key].append(seconds)
    return times


def timed_warm(call: Callable[[], object], seconds: float = 0.05) -> float:
    """Mean seconds of a call over `seconds`, after one that fills caches and wakes threads."""
    call()
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < seconds:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round; what a shared machine does to a round cancels out."""
    return median(one / other for one, other in zip(values, others, strict=True))
