"""Pinning OpenMP's threads to their cores, which torch's and ours are."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from hasten.errors import ConfigError, HastenWarning
from hasten.machine.processor import by_cores

Threads = int | Literal["auto"]  # what an option takes

# One thread a core, each kept there. A user's own settings of the same kind come first.
PINNING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
OTHERS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def thread_count(threads: Threads | None) -> int | None:
    """The number that was asked for, None for auto. Raises ConfigError below 1."""
    if threads == "auto" or threads is None:
        return None
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1, or auto")
    return threads


@contextmanager
def share_of_cores(part: int, parts: int) -> Iterator[None]:
    """Restrict this thread, and those it starts, to part `part` of `parts` equal parts of its cores (on Linux).

    A core's hardware threads, whose numbers often lie half the machine apart, go to one part where there are enough.

    For processes that wait for each other many times a second: two of them on one core take turns, look busy
    all the time, and are left there.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    cores = by_cores(before)
    if len(cores) < parts:
        cores = [[number] for number in sorted(before)]
    first = part * len(cores) // parts
    own = cores[first : max(first + 1, (part + 1) * len(cores) // parts)]
    os.sched_setaffinity(0, [number for core in own for number in core])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin_threads() -> None:
    """Have every thread of torch's pool stay on a core of its own. To be called before torch is imported.

    The OpenMP library reads its environment once, when torch loads it; a HastenWarning says so where that is past. The
    process's first thread is then bound to the first core, and what it starts (processes, Python threads) inherits
    that: this is for a process that computes and does little else.
    """
    if "torch" in sys.modules:
        warnings.warn(
            "threads stay unpinned: torch is loaded already, and OpenMP reads its settings only then; set "
            "OMP_PROC_BIND=true in the environment instead",
            HastenWarning,
            stacklevel=2,
        )
        return
    if any(name in os.environ for name in (*PINNING, *OTHERS)):
        return
    os.environ.update(PINNING)
