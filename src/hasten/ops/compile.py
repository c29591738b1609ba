"""Compiles C++ sources into one shared library: the longest first, as many at a time as there are cores.

It takes tens of seconds, so there is a bar with the time that is left. The share of each source is known
(`COMPILE_SECONDS`); how fast this machine is now is learned from what is done and from what runs longer than thought.
"""

import heapq
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hasten.errors import ResourceError
from hasten.machine import available_cores
from hasten.machine.progress import bars, on_terminal

TIMEOUT = 600  # seconds for one source
# What each source takes of one core (g++ 12, Zen 4, AVX2). Only an estimate hangs on it, and the order.
COMPILE_SECONDS: Mapping[str, float] = {
    "attention/train.cpp": 8.0,
    "block/block.cpp": 6.0,
    "linear/linear.cpp": 6.0,
    "attention/native.cpp": 5.0,
    "activation/activation.cpp": 4.0,
    "linear/gemm.cpp": 3.5,
    "linear/unpacked.cpp": 2.3,
    "collective/collective.cpp": 1.5,
    "draw/draw.cpp": 1.5,
    "linear/amx.cpp": 1.0,
    "block/grow.cpp": 2.5,
}
UNKNOWN_SECONDS = 1.0
REDRAW = 0.2  # seconds between two looks at the bar
SAY_AGAIN = 10.0  # seconds between two lines where there is no terminal


@dataclass(slots=True)
class Estimate:
    """How far a set of sources is, and the seconds that are left.

    expected: seconds each source would take on the machine of `COMPILE_SECONDS`, in the order they are begun. workers:
    how many run at a time. first_guess: seconds here for a second there, while nothing better is known.
    """

    expected: Mapping[str, float]
    workers: int
    first_guess: float = 1.0
    began: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)

    def _running(self) -> dict[str, float]:
        """When each source that is not done was begun. Copies, because other threads write both."""
        began, took = self.began.copy(), self.took.copy()
        return {name: start for name, start in began.items() if name not in took}

    def slowness(self, now: float) -> float:
        """Seconds here for a second there: of what is done, and at least what running sources show by now."""
        took = self.took.copy()
        known = sum(took.values()) / sum(self.expected[name] for name in took) if took else self.first_guess
        return max([known, *((now - start) / self.expected[name] for name, start in self._running().items())])

    def left(self, now: float) -> float:
        """Seconds until the last source is done, when each goes to the first worker that is free."""
        slowness, running = self.slowness(now), self._running()
        free = [max(0.0, slowness * self.expected[name] - (now - start)) for name, start in running.items()]
        free += [0.0] * (self.workers - len(free))
        heapq.heapify(free)
        for name, seconds in self.expected.items():
            if name not in running and name not in self.took:
                heapq.heappush(free, heapq.heappop(free) + slowness * seconds)
        return max(free)


def compile_library(
    command: Sequence[str],
    link: Sequence[str],
    *,
    sources: Path,
    names: Sequence[str],
    place: Path,
    log: Path,
    title: str,
) -> Path:
    """Compile sources/name for each of the names with `command`, link them with `link`, in the folder `place`.

    Shows "compiling <title>" and the time left on standard error. Returns the library. Raises ResourceError with the
    first error in its message, and the whole output in `log`.
    """
    expected = {name: COMPILE_SECONDS.get(name, UNKNOWN_SECONDS) for name in names}
    order = sorted(names, key=lambda name: -expected[name])
    cores = available_cores().logical
    workers = max(1, min(len(order), cores))
    busy = (os.getloadavg()[0] + workers) / cores  # processes that want a core
    estimate = Estimate({name: expected[name] for name in order}, workers, first_guess=max(1.0, busy))
    objects = {name: str(place / (Path(name).with_suffix(".o").as_posix().replace("/", "-"))) for name in names}

    def compile_one(name: str) -> None:
        estimate.began[name] = start = time.monotonic()
        call([*command, "-c", str(sources / name), "-o", objects[name]], log)
        estimate.took[name] = time.monotonic() - start

    with ThreadPoolExecutor(workers) as pool, _shown(title, estimate) as show:
        running: set[Future[None]] = {pool.submit(compile_one, name) for name in order}
        try:
            while running:
                done, running = wait(running, REDRAW, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                show()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    library = place / "library.so"
    call([command[0], "-shared", *objects.values(), "-o", str(library), *link], log)
    return library


def call(command: Sequence[str], log: Path) -> None:
    """Run a compiler. Raises ResourceError where it fails."""
    try:
        # English messages, so that the first error can be found in them.
        environment = {**os.environ, "LC_ALL": "C"}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"the compiler {command[0]} did not run: {error}") from error
    if answer.returncode:
        log.write_text(f"{' '.join(command)}\n{answer.stdout}{answer.stderr}")
        lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        first = next((line for line in lines if re.search(r"\berror:", line)), lines[0] if lines else "no message")
        raise ResourceError(f"{command[0]} failed: {first}; its whole output is in {log}")


@contextmanager
def _shown(title: str, estimate: Estimate) -> Iterator[Callable[[], None]]:
    """Says what is compiled and how long it takes, as a bar or in lines; yields what brings that up to date."""
    from rich.errors import LiveError

    start = said = time.monotonic()
    with ExitStack() as stack:
        display = None
        if on_terminal():
            with suppress(LiveError):  # somebody else's bar is on the screen
                display = stack.enter_context(bars("about {task.fields[left]} left, once"))
        if display is None:
            _say(f"compiling {title}: about {_seconds(estimate.left(start))}, once")
        else:
            task = display.add_task(f"compiling {title}", total=1.0, left=_seconds(estimate.left(start)))

        def show() -> None:
            nonlocal said
            now = time.monotonic()
            left = estimate.left(now)
            if display is not None:
                display.update(task, completed=(now - start) / (now - start + left + 1e-9), left=_seconds(left))
            elif now - said >= SAY_AGAIN:
                said = now
                _say(f"  {now - start:.0f} s, about {_seconds(left)} left")

        yield show
        if display is None:
            _say(f"  done in {_seconds(time.monotonic() - start)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _seconds(count: float) -> str:
    return f"{math.ceil(count)} s"
