"""Where the tokens of a step lie in a paged cache: host arrays in one buffer, copied to a device in one piece."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.ops.attention.paged import PagedGroup, groups_of
from hasten.ops.states import SequenceGroup, group_sequences

_ALIGNED = 16  # values: parts of a buffer begin at multiples, and tables have multiples of columns, so that kernels
# compiled for aligned addresses and sizes are compiled once
_SPARE = 4  # columns of a table that a sequence may grow by before all of it is laid out again


class RaggedLayout:
    """The tokens of several sequences end to end in one row.

    int64 arrays in one buffer: positions and slots (N,), query_start_loc (B + 1,), seq_lens (B,), table (B, columns).
    `go_on` moves a step of one token a sequence on by one token each, writing only what changes.
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
        self.stretched = np.repeat([row.stretched for row in rows], counts)  # (N,)
        self.state_slots = [row.slot for row in rows]
        self.certain = [row.count - row.guesses for row in rows]  # tokens, after which states are kept
        self._groups: list[PagedGroup] | None = None
        self._one_each: np.ndarray | None = None  # what is added to the buffer when all go on by a token

    def parts(self, buffer: Tensor | np.ndarray) -> list:
        """The arrays in a buffer laid out like this one's, the table still flat."""
        return [buffer[at : at + size] for at, size in zip(self.places, self.sizes, strict=False)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.seq_lens.max())

    def groups(self, place: Callable[[Tensor], Tensor]) -> list[PagedGroup]:
        """The step's `PagedGroup`s on the device, made when a kernel first asks."""
        if self._groups is None:
            found = groups_of(self.query_start_loc, self.seq_lens, self.table, self.block_size)
            self._groups = [PagedGroup(*map(place, group[:3])) for group in found]
        return self._groups

    def groups_of_states(self, device: torch.device) -> list[SequenceGroup]:
        """The step's sequences, and where the states of each are."""
        first = self.query_start_loc[:-1]
        counts = np.diff(self.query_start_loc)
        starts = (self.seq_lens - counts).tolist()
        return group_sequences(
            first.tolist(),
            counts.tolist(),
            tokens=self.tokens,
            device=device,
            starts=starts,
            slots=self.state_slots,
            certain=self.certain,
        )

    def go_on(self, entered: Sequence[tuple[int, int]]) -> bool:
        """Become the layout of the next token of each sequence, after a step of one token each.

        entered: (sequence, block) for each that begins a block. In place: what was handed out of this layout changes
        with it. False, and nothing is changed, where the table has no column for a block.
        """
        assert self.most == 1, "only a step of one token a sequence can go on"
        if entered and not self.has_columns(entered):
            return False
        size, self._groups = self.block_size, None
        if self._one_each is None:
            self._one_each = np.zeros(self.places[4], dtype=np.int64)  # as long as what is in front of the table
            positions, slots, _, seq_lens, *_ = self.parts(self._one_each)
            for part in (positions, slots, seq_lens):
                part[:] = 1
        self.buffer[: len(self._one_each)] += self._one_each
        for sequence, block in entered:
            self.table[sequence, (self.seq_lens[sequence] - 1) // size] = block
            self.slots[sequence] = block * size
        return True

    def has_columns(self, entered: Sequence[tuple[int, int]]) -> bool:
        """Whether the table has room for the blocks with which `go_on` is to be called."""
        columns = self.table.shape[1]
        return all(self.seq_lens[sequence] // self.block_size < columns for sequence, _ in entered)

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


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def to_device(values: list[Any], device: torch.device) -> Tensor:
    """int64 values on the device; the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
