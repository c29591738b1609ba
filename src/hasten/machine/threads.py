"""Pins OpenMP's threads (torch's and ours) to cores."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from hasten.errors import ConfigError, HastenWarning
from hasten.machine.processor import by_cores

Threads = int | Literal["auto"]  # what an option takes

SHORT_WAIT = {"GOMP_SPINCOUNT": "2000"}  # some 30 us on a processor of 3 GHz; 300,000 by default
# One thread a core, each kept there. A user's own settings of the same kind come first.
PINNING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
OTHERS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def thread_count(threads: Threads | None) -> int | None:
    """Parse a number of threads; None for auto. Raises ConfigError below 1."""
    if threads == "auto" or threads is None:
        return None
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1, or auto")
    return threads


@contextmanager
def share_of_cores(part: int, parts: int) -> Iterator[None]:
    """Restrict this thread, and those it starts, to part `part` of `parts` equal parts of its cores (on Linux).

    The hardware threads of a core, whose numbers are often far apart, stay in one part if there are enough cores.

    For processes that wait for each other many times a second: if two share a core, they take turns, both look busy,
    and the scheduler leaves them there.
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
    """Pin each thread of torch's pool to a core of its own. Must be called before torch is imported.

    The OpenMP library reads its environment once, when torch loads it; after that, a HastenWarning says that it is too
    late. The process's first thread is bound to the first core, and the processes and Python threads that it starts
    inherit that, so this is for a process that does little besides computing.
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


def wait_briefly() -> None:
    """Have OpenMP's threads sleep soon when they wait for each other. Must be called before torch is imported.

    GNU's OpenMP spins for milliseconds. When another program has one core and two threads of ours are on the other one,
    the first spins while the second waits for its turn, at each of thousands of barriers: a step of training that takes
    0.15 s took 5 s, and 0.4 s with short waits. A user's own settings come first.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SHORT_WAIT.items():
            os.environ.setdefault(name, value)
