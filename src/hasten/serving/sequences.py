"""What the scheduler speaks of: sequences, and the parts of them that a step computes. Numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One text in the making: a sample, or a beam.

    order: (priority, arrival of the request, number within it): smaller is served first and preempted last. slots:
    how many sequences it will become (samples that still share their prompt). drafts: guessed tokens behind `tokens`,
    to be verified in the next step.
    """

    number: int
    request: int
    order: tuple[int, int, int]
    tokens: list[int]
    salt: str = ""
    slots: int = 1
    drafts: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens found in the prefix cache when it was first begun
    running: bool = False
    begun: bool = False

    @property
    def target(self) -> int:
        return len(self.tokens) + len(self.drafts)


@dataclass(slots=True, eq=False)
class Scheduled:
    """`count` tokens of one sequence from position `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def complete(self) -> bool:
        """Whether it gets to its last token, so that the next can be drawn."""
        return self.end == self.sequence.target


@dataclass(slots=True, eq=False)
class StepPlan:
    """A step. copies: (source, target) blocks to be copied before it, in this order."""

    entries: list[Scheduled]
    copies: list[tuple[int, int]]
