"""Processes that measure in turns, round after round, so that all of them see the same states of a shared machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.bench.child import Child, ChildError
from hasten.bench.worker import Measured, Ready, Task


@dataclass(slots=True)
class RungOutcome:
    """What came of one rung: its rounds, or the error that ended it."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)
    setup_seconds: float = 0.0
    again: Ready | None = None  # the second set-up
    peak_memory_bytes: int = 0
    error: str | None = None
    traceback: str = ""

    def fail(self, error: ChildError) -> None:
        self.error, self.traceback = error.message, error.child_traceback

    def take(self, measured: Measured, *, counts: bool) -> None:
        if counts:
            self.rounds.append(measured.metrics)
        self.peak_memory_bytes = max(self.peak_memory_bytes, measured.peak_memory_bytes)

    def ready(self, ready: Ready) -> None:
        if not self.description:  # a restarted process finds what the first one compiled and cached
            self.description, self.setup_seconds = ready.description, ready.seconds
        elif self.again is None:
            self.again = ready


class InterleavedRounds:
    """One process for each task, by name. timeout: seconds that an answer may take.

    keep: all of them stay alive until the end; else each is started anew for each round. twice: those that are set up
    in two processes, one after the other. warm: those that warm themselves up, and take no part in the warm-up.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        *,
        timeout: float,
        keep: bool = True,
        twice: Collection[str] = (),
        warm: Collection[str] = (),
    ) -> None:
        self.tasks, self.timeout, self.keep, self.twice, self.warm = tasks, timeout, keep, twice, warm
        self.children: dict[str, Child] = {}
        self.outcomes = {name: RungOutcome() for name in tasks}

    def run(
        self, *, rounds: int, warmup: int = 0, tell: Callable[[str], None] = lambda text: None
    ) -> dict[str, RungOutcome]:
        """What came of each. The warm-up's rounds are not counted; one that fails is left out from there on."""
        try:
            if self.keep:
                for name in self.tasks:
                    tell(f"setting up: {name}")
                    self._start(name)
            first = 1 - warmup if self.keep else 1  # rounds 0, -1, … are the warm-up
            for number in range(first, rounds + 1):
                title = f"round {number} of {rounds}" if number > 0 else "warm-up"
                for name in self.tasks:
                    tell(f"{title}: {name}")
                    self._measure(name, number, warmup)
        except BaseException:
            for child in self.children.values():
                child.abort()
            raise
        for child in self.children.values():
            child.close()
        return self.outcomes

    def _start(self, name: str) -> None:
        outcome = self.outcomes[name]
        try:
            for last in (False, True) if name in self.twice and outcome.again is None else (True,):
                child = self.children[name] = Child(self.tasks[name], timeout=self.timeout)
                outcome.ready(child.wait_ready())
                if not last:
                    child.close()
        except ChildError as error:
            self._drop(name, error)

    def _measure(self, name: str, number: int, warmup: int) -> None:
        outcome = self.outcomes[name]
        if outcome.error is not None or (name in self.warm and number < 1):
            return
        if not self.keep:
            self._start(name)
        try:
            if not self.keep and name not in self.warm:
                for _ in range(warmup):
                    if name in self.children:
                        outcome.take(self.children[name].measure(), counts=False)
            if name in self.children:
                outcome.take(self.children[name].measure(), counts=number > 0)
        except ChildError as error:
            self._drop(name, error)
        if not self.keep and name in self.children:
            self.children.pop(name).close()

    def _drop(self, name: str, error: ChildError) -> None:
        self.outcomes[name].fail(error)
        self.children.pop(name).abort()
