"""Where the tokens of a step lie in a paged cache: host arrays in one buffer, copied to a device in one piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hasten.engine.blocks import SequenceBlocks
from hasten.ops.attention.paged import PagedGroup, groups_of

_ALIGNED = 16  # values: parts of a buffer begin at multiples, and tables have multiples of columns, so that kernels
# compiled for aligned addresses and sizes are compiled once
_SPARE = 4  # columns of a table that a sequence may grow by before all of it is laid out again


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` tokens of one sequence, at positions start … start + count - 1; block_table: its blocks in order."""

    block_table: Sequence[int] | SequenceBlocks
    start: int
    count: int


class RaggedLayout:
    """The tokens of several sequences end to end in one row.

    int64 arrays in one buffer: positions and slots (N,), query_start_loc (B + 1,), seq_lens (B,), table (B, columns).
    `advance` moves a step of one token a sequence on by one token each, writing only what changes.
    """

    def __init__(self, rows: Sequence[Rows], block_size: int) -> None:
        self.block_size = block_size
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        self.tokens, self.most, ends = int(counts.sum()), int(counts.max()), starts + counts
        needed = -(-ends // block_size)
        columns = _aligned(int(needed.max()) + _SPARE)
        sizes = (self.tokens, self.tokens, len(rows) + 1, len(rows), len(rows) * columns)
        self.places = np.cumsum([0, *map(_aligned, sizes)]).tolist()
        self.sizes = sizes
        self.buffer = np.zeros(self.places[-1], dtype=np.int64)
        self.positions, self.slots, self.query_start_loc, self.seq_lens, table = self.parts(self.buffer)
        self.table: np.ndarray = table.reshape(len(rows), columns)
        for own, row, blocks in zip(self.table, rows, needed.tolist(), strict=True):
            held = row.block_table
            assert row.count > 0, "a sequence without tokens has no part in a step"
            assert len(held) >= blocks, f"{row.start + row.count} tokens in {len(held)} blocks of {block_size}"
            own[:blocks] = held[:blocks]
        self.seq_lens[:] = ends
        np.cumsum(counts, out=self.query_start_loc[1:])
        of = np.repeat(np.arange(len(rows)), counts)  # (N,) sequences
        first = self.query_start_loc[:-1] - starts
        self.positions[:] = np.arange(self.tokens) - np.repeat(first, counts)
        self.slots[:] = self._slots(of)
        # What `advance` compares with; tables of other kinds say nothing of what has changed in them.
        single = self.most == 1 and all(isinstance(row.block_table, SequenceBlocks) for row in rows)
        self._seen = [_seen(row.block_table) for row in rows] if single else None  # type: ignore[arg-type]
        self._ends: list[int] = ends.tolist()
        self._groups: list[PagedGroup] | None = None

    def parts(self, buffer: Tensor | np.ndarray) -> list:
        """The arrays in a buffer laid out like this one's, the table still flat."""
        return [buffer[at : at + size] for at, size in zip(self.places, self.sizes, strict=False)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._ends)

    def groups(self, place: Callable[[Tensor], Tensor]) -> list[PagedGroup]:
        """The step's `PagedGroup`s on the device, made when a kernel first asks."""
        if self._groups is None:
            found = groups_of(self.query_start_loc, self.seq_lens, self.table, self.block_size)
            self._groups = [PagedGroup(*map(place, group[:3])) for group in found]
        return self._groups

    def advance(self, rows: Sequence[Rows]) -> bool:
        """Become the layout of these rows, if they are the same sequences with their next tokens; False: they are not.

        In place: what was handed out of this layout changes with it.
        """
        seen, ends = self._seen, self._ends
        if seen is None or len(rows) != len(seen):
            return False
        size, columns = self.block_size, self.table.shape[1]
        entered = []  # sequences that begin a block
        for i, row in enumerate(rows):
            table, start = row.block_table, row.start
            known = seen[i]
            if (
                row.count != 1
                or start != ends[i]
                or table is not known[0]
                or table.edits != known[1]
                or table.left != known[2]
            ):
                return False
            if start % size == 0:
                if start // size >= columns:
                    return False
                entered.append(i)
        for i in entered:
            row = rows[i]
            column = row.start // size
            self.table[i, column] = row.block_table[column : column + 1][0]
        self._ends = [end + 1 for end in ends]
        self._groups = None
        self.seq_lens += 1
        self.positions += 1
        if entered:
            self.slots[:] = self._slots(np.arange(len(rows)))
        else:
            self.slots += 1
        return True

    def _slots(self, of: np.ndarray) -> np.ndarray:
        """The slots (N,) of the tokens of these sequences (N,)."""
        size = self.block_size
        return self.table[of, self.positions // size] * size + self.positions % size

    def on(self, device: torch.device) -> list[Tensor]:
        """The arrays as tensors, the table (B, columns); on a CPU they share the layout's memory."""
        whole = torch.from_numpy(self.buffer)
        if device.type == "cuda":
            whole = whole.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            whole = whole.to(device)
        *vectors, table = self.parts(whole)
        return [*vectors, table.view(self.table.shape)]


def _seen(table: SequenceBlocks) -> tuple[SequenceBlocks, int, int]:
    return table, table.edits, table.left


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def to_device(values: list[Any], device: torch.device) -> Tensor:
    """int64 values on the device; the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
