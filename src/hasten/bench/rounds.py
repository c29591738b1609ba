"""Processes that measure in turns, round after round, so that all of them see the same states of a shared machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.bench.process import Child, ChildError, Rung


@dataclass(slots=True)
class RungRun:
    """One rung while its ladder runs: its process, and its rounds so far or the error that ended it."""

    rung: Rung
    timeout: float = 3600.0  # seconds that an answer may take
    child: Child | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] | None = None  # the description after the second set-up
    peak_memory_bytes: int = 0
    error: str | None = None
    traceback: str = ""

    def start(self) -> None:
        """Set up a process, or two of a rung that leaves something behind; nothing after an error."""
        if self.error is not None:
            return
        try:
            if self.rung.twice and self.again is None:
                self._set_up().close()
            self._set_up()
        except ChildError as error:
            self._fail(error)

    def measure(self, *, counts: bool) -> None:
        """Measure once; nothing without a process."""
        if self.child is None:
            return
        try:
            metrics, peak = self.child.measure()
        except ChildError as error:
            self._fail(error)
            return
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
        if counts:
            self.rounds.append(metrics)

    def end(self, *, at_once: bool = False) -> None:
        """End the process, politely or in the middle of whatever it does."""
        if self.child is not None:
            self.child.close(at_once=at_once)
            self.child = None

    def _set_up(self) -> Child:
        self.child = Child(self.rung, timeout=self.timeout)
        description = self.child.wait_ready()
        if not self.description:  # a restarted process finds what the first one compiled and cached
            self.description = description
        elif self.again is None:
            self.again = description
        return self.child

    def _fail(self, error: ChildError) -> None:
        self.error, self.traceback = error.message, error.child_traceback
        self.end(at_once=True)


def run_interleaved(
    rungs: Sequence[Rung],
    *,
    rounds: int,
    timeout: float,
    warmup: int = 0,
    keep: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> list[RungRun]:
    """What came of each rung. The warm-up's rounds are not counted; one that fails is left out from there on.

    keep: all processes stay alive until the end; else each is started anew for each round. tell: called with a line
    about each step.
    """
    runs = [RungRun(rung, timeout) for rung in rungs]
    try:
        for run in runs if keep else ():
            tell(f"setting up: {run.rung.name}")
            run.start()
        for number in range(1 - warmup if keep else 1, rounds + 1):  # rounds 0, -1, … are the warm-up
            for run in runs:
                tell(f"{f'round {number} of {rounds}' if number > 0 else 'warm-up'}: {run.rung.name}")
                if not keep:
                    run.start()
                    for _ in range(warmup):
                        run.measure(counts=False)
                run.measure(counts=number > 0)
                if not keep:
                    run.end()
    except BaseException:
        for run in runs:
            run.end(at_once=True)
        raise
    for run in runs:
        run.end()
    return runs
