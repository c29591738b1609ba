"""Sequences of tokens as the scheduler has them, and what a step computes of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hasten.engine.blocks import Rows, SequenceBlocks


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledSequence:
    """One text in the making: a sample, or a beam.

    order: (priority, arrival of the request, number within it): smaller is served first and preempted last. slots:
    how many sequences it will become (samples that still share their prompt). drafts: guessed tokens behind `tokens`,
    to be verified in the next step. scored: of its first tokens, those whose logits are wanted too.
    """

    number: int
    order: tuple[int, int, int]
    tokens: list[int]
    salt: str = ""
    adapter: int = -1  # which of the model's, -1 for none
    slots: int = 1
    drafts: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens found in the prefix cache when it was first begun
    running: bool = False
    begun: bool = False
    scored: int = 0

    @property
    def request(self) -> int:
        """Its request's number, by arrival."""
        return self.order[1]

    @property
    def target(self) -> int:
        return len(self.tokens) + len(self.drafts)


@dataclass(slots=True, eq=False)
class ScheduledTokens(Rows):
    """What a step computes of one sequence. copies: (source, target) blocks to be copied before, in this order."""

    block_table: SequenceBlocks
    sequence: ScheduledSequence = field(kw_only=True)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute; 0 for the next one of a sequence where only the device knows it yet."""
        sequence, start = self.sequence, self.start
        if self.count == 1 and not sequence.drafts:
            return [sequence.tokens[start] if start < len(sequence.tokens) else 0]
        return (sequence.tokens + sequence.drafts if sequence.drafts else sequence.tokens)[start : self.end]

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def complete(self) -> bool:
        """Whether it gets to its last token, so that the next can be drawn."""
        return self.end == self.sequence.target

    @property
    def scored(self) -> int:
        """How many of its logits are wanted beside those of its last token."""
        return max(0, min(self.end, self.sequence.scored) - self.start)
