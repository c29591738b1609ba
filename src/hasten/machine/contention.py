"""Fewer threads while other programs need this process's cores.

A team of threads meets at hundreds of barriers a token. When another program takes the core of one of them, all others
wait until the scheduler lets it go on, some milliseconds each time: beside one busy loop two threads generate at a
quarter of their speed, and one thread, which then has a core to itself, at three quarters.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch

WINDOW = 0.08  # seconds between two looks at what the operating system counted
# Times a second that each thread loses its core: alone some 15, beside a busy loop 75 to 950.
SWITCHES = 40.0
LOST = 0.15  # of the time the threads could have had; alone it is 0.02
FREE = 0.8  # of a core that was idle throughout a window, for it to count as free again
HOLD = 4  # times the window in which cores were lost, before they are tried again: a step of training may take seconds
CONTENDED = 0.4  # cores that other programs use, from which on people should hear of it
VARIABLE = "HASTEN_SHARE_CORES"


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What this process has used since it began: seconds of its threads on cores, and how often one was taken away."""

    seconds: float
    switches: int


def usage() -> ProcessUsage | None:
    """The usage of this process; None where the operating system does not count it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    counted = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessUsage(counted.ru_utime + counted.ru_stime, counted.ru_nivcsw)


def idle_seconds() -> float:
    """The seconds for which the cores that this process may use were idle, all together, since the machine began."""
    import psutil

    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        cores = [core for number, core in enumerate(cores) if number in allowed] or cores
    return float(sum(core.idle for core in cores))


def used_by_others(seconds: float = 0.3) -> float:
    """How many of this process's cores other programs use, measured while this thread sleeps for `seconds`.

    0 where the operating system does not count what this process uses.
    """
    used, idle, started = usage(), idle_seconds(), time.perf_counter()
    time.sleep(seconds)
    after, passed = usage(), time.perf_counter() - started
    if used is None or after is None:
        return 0.0
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return max(0.0, cores - (idle_seconds() - idle + after.seconds - used.seconds) / passed)


class SharedCores:
    """Runs steps of work on torch's threads, or on fewer while other programs take cores away from them.

    Each step is a `with` block, in which `torch.get_num_threads()` says how many there are; outside they are as before.
    Steps whose results depend on the number of threads must not be run so, if their bits matter.
    """

    def __init__(self) -> None:
        self.given_up = 0  # threads that the next step leaves out
        self._threads = self._most = torch.get_num_threads()
        self.running = False  # whether a step is
        self._idle: float | None = None
        self._hold = 0.0  # time.perf_counter() before which no thread comes back
        self._since, self._used = time.perf_counter(), usage()

    def __enter__(self) -> None:
        self.running = True
        self._threads = self._most = torch.get_num_threads()
        if self.given_up and self._most > 1:
            self._threads = max(1, self._most - self.given_up)
            torch.set_num_threads(self._threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.running = False
        if self._threads != self._most:
            torch.set_num_threads(self._most)
        if self._most == 1 or self._used is None:
            return
        now = time.perf_counter()
        if now - self._since >= WINDOW:
            self._look(now)

    def _look(self, now: float) -> None:
        """Decide by the window that ends now how many threads the next steps leave out."""
        before, after, seconds = self._used, usage(), now - self._since
        assert before is not None
        assert after is not None
        self._since, self._used = now, after
        lost = 1 - (after.seconds - before.seconds) / (seconds * self._threads)
        contended = lost > LOST and after.switches - before.switches > SWITCHES * self._threads * seconds
        if not contended and not self.given_up:
            return
        idle = idle_seconds()
        free = 0 if self._idle is None else int((idle - self._idle) / seconds + 1 - FREE)  # cores
        if contended and self._threads > 1 and not free:
            self.given_up = min(self.given_up + 1, self._most - 1)
            self._hold = now + HOLD * seconds
        elif now >= self._hold:
            self.given_up = max(0, self.given_up - free)
        self._idle = idle if self.given_up else None


_OF_THREAD = threading.local()  # torch's number of threads is a setting of the thread that asks


def shared_cores() -> AbstractContextManager[None]:
    """A context for a step of this thread that shares cores with other programs; a step inside one is a part of it."""
    found: SharedCores | None = getattr(_OF_THREAD, "cores", None)
    if found is None:
        found = _OF_THREAD.cores = SharedCores()
    return nullcontext() if found.running else found


def context_of_steps(*, shares_cores: bool) -> Callable[[], AbstractContextManager[None]]:
    """What makes the context of each step, chosen once: `shared_cores`, or one that does nothing.

    shares_cores: the steps may run on fewer threads. HASTEN_SHARE_CORES=0 turns it off for all.
    """
    return shared_cores if shares_cores and os.environ.get(VARIABLE) != "0" else nullcontext
