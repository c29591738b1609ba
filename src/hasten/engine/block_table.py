"""The block table of a sequence, and which of its tokens a step computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class BlockStats:
    """prefix_hits of prefix_queries: prompt tokens found in the prefix cache, counted when first written."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    evicted_blocks: int = 0  # cached ones whose room was needed
    copied_blocks: int = 0  # at a write
    used_blocks: int = 0  # that a table refers to now
    shared_blocks: int = 0  # of these, those that several tables refer to
    blocks_saved: int = 0  # further ones that would be used now if nothing were shared


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """A sequence's blocks, read as its block table: blocks that left the attention window point to the first one kept.

    Positions below `held` have (or get in this step) their keys; those up to `room` may be written. The first `left`
    entries of block_table are of blocks that no query looks back to any more: others may have them. edits: how often
    entries were replaced or removed, so that a copy of the table can be kept and extended. private: no other sequence
    can begin with its blocks. slot: the place of its states (`StateSlots`). mark: tokens of the full blocks
    of what it had to read when it began, behind which a snapshot of its states is taken.
    """

    block_table: list[int]
    chain: list[bytes]  # the key of the beginning, then of each full block so far
    held: int
    room: int
    asked: int  # tokens of the prompt, until they are counted
    left: int = 0
    edits: int = 0
    private: bool = False
    slot: int = 0
    mark: int = 0

    def __len__(self) -> int:
        return len(self.block_table)

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __getitem__(self, part: slice) -> list[int]:
        if not self.left:
            return self.block_table[part]
        return (self.own[:1] * self.left + self.own)[part]

    @property
    def own(self) -> list[int]:
        """Its blocks (a copy)."""
        return self.block_table[self.left :]

    @property
    def offered(self) -> int:
        """How many full blocks came from the prefix cache or were offered to it."""
        return len(self.chain) - 1


@dataclass(slots=True, eq=False)
class Rows:
    """`count` tokens of a sequence from position `start` on. stretched: it exceeds longrope's pretraining context.

    guesses: the last tokens of these that may be taken back; the states of layers are kept before them.
    """

    block_table: Sequence[int] | SequenceBlocks
    start: int
    count: int
    stretched: bool = False
    guesses: int = field(default=0, kw_only=True)

    @property
    def slot(self) -> int:
        """The place of the sequence's states, where layers keep any."""
        return self.block_table.slot if isinstance(self.block_table, SequenceBlocks) else 0
