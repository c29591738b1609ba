"""The tensors of a decode step, allocated once on the device and filled in place: captured steps can be replayed.

A step has a `StepShape`, one of a few padded sizes. All that the host says lies in one buffer, filled by one copy. The
block tables stay on the device; only new entries of them are copied. A sequence keeps its row while it is in the batch.
While the same sequences go on, `hasten.engine.device_sampler` moves the batch on by itself, and the host writes only
what it alone knows: blocks that a sequence enters, and sequences that leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.engine.block_table import SequenceBlocks
from hasten.engine.cache import KVCache
from hasten.engine.sequence import ScheduledTokens

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # sequences of a captured step
WIDTHS = (1, 2, 4, 8, 16, 32)  # tokens of each: one, and those of a draft
_REACHES = 4  # from one bound of a step's context to the next
_SHORTEST = 512  # the first of them, tokens
_ALIGNED = 16  # values: parts of the buffer begin at multiples


class StepShape(NamedTuple):
    """The padded size of a step: sequences, tokens of each, and the most that one of them may have in all."""

    sequences: int
    width: int
    longest: int

    def covers(self, other: StepShape) -> bool:
        """Whether a step of the other shape can be padded to this one."""
        return all(own >= wanted for own, wanted in zip(self, other, strict=True))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of the batch's buffer, or of the host's, for steps of one shape; all int64 but `floats`.

    tokens (S, W); lengths (S,): each sequence's tokens after this step, 0 for padding; counts (S,): of them, those that
    are new; steps, seeds, least, top_k (S,): tokens generated so far, the noise's seed, min_new_tokens, and top-k.
    floats (6, S) float64: temperature (0: greedy), top_p, log min_p, repetition, presence and frequency penalties.
    """

    tokens: Any
    lengths: Any
    counts: Any
    steps: Any
    seeds: Any
    least: Any
    top_k: Any
    floats: Any


class DecodeBatch:
    """The buffer, the tables, and which row is whose."""

    def __init__(self, cache: KVCache, *, sequences: int, longest: int) -> None:
        """sequences: most at once. longest: most tokens of one."""
        self.cache, self.device, self.block_size = cache, cache.device, cache.block_size
        self.sequences = min(padded(sequences, SIZES), SIZES[-1])
        self.longest = longest
        # Padding of a draft may look beyond the longest text, into blocks that are nobody's.
        columns = -(-(longest + WIDTHS[-1]) // self.block_size)
        self.block_table = torch.zeros(self.sequences, columns, dtype=torch.int64, device=self.device)
        self.buffer = torch.zeros(_places(self.sequences, WIDTHS[-1])[-1], dtype=torch.int64, device=self.device)
        starts = torch.arange(self.sequences + 1, device=self.device)
        self.query_start_loc = {width: starts * width for width in WIDTHS}
        self.rows: dict[int, int] = {}  # of the sequences
        self._copied: list[tuple[SequenceBlocks | None, int, int]] = [(None, 0, 0)] * self.sequences  # of each table
        self._views: dict[tuple[int, ...], StepTensors] = {}

    def shape(self, *, sequences: int, width: int, longest: int) -> StepShape | None:
        """The padded size of such a step, or None where there is none."""
        if sequences > self.sequences or width > WIDTHS[-1] or longest > self.longest:
            return None
        reach = _SHORTEST
        while reach < longest:
            reach *= _REACHES
        return StepShape(padded(sequences, SIZES), padded(width, WIDTHS), min(reach, self.longest))

    def views(self, shape: StepShape) -> StepTensors:
        """The tensors of a step of this shape; shapes share their memory."""
        key = shape[:2]
        if key not in self._views:
            self._views[key] = _tensors(self.buffer, *key)
        return self._views[key]

    def restart(self) -> None:
        """Forget all sequences, whose numbers may come again."""
        self.rows, self._copied = {}, [(None, 0, 0)] * self.sequences

    # -- rows ---------------------------------------------------------------------------------------------------------

    def place(self, numbers: Sequence[int]) -> list[int]:
        """The rows of these sequences, below `padded`: each in the one it had where it can stay. Others leave."""
        most = padded(len(numbers), SIZES)
        kept = self.rows
        if len(kept) != len(numbers) or any(number not in kept for number in numbers):
            kept = {number: row for number in numbers if (row := self.rows.get(number, most)) < most}
            taken = set(kept.values())
            free = (row for row in count() if row not in taken)
            for number in numbers:
                if number not in kept:
                    kept[number] = next(free)
            self.rows = kept
        elif max(kept.values(), default=0) >= most:
            self.rows = {}
            return self.place(numbers)
        return [kept[number] for number in numbers]

    # -- what is copied to the device ---------------------------------------------------------------------------------

    def fill(self, shape: StepShape, plan: Sequence[ScheduledTokens], values: np.ndarray | None = None) -> list[int]:
        """Write a whole step; returns the rows of its sequences. values int64 (10, P): what `sampler` draws with."""
        rows = self.place([entry.sequence.number for entry in plan])
        width = shape.width
        staged = np.zeros(_places(*shape[:2])[-1], dtype=np.int64)
        step = _tensors(staged, *shape[:2])
        if width == 1:
            at = np.array(rows)
            step.tokens[at, 0] = [entry.tokens[0] for entry in plan]
            step.lengths[at] = [entry.end for entry in plan]
            step.counts[at] = 1
        else:
            for row, entry in zip(rows, plan, strict=True):
                step.tokens[row, : entry.count] = entry.tokens
                step.lengths[row], step.counts[row] = entry.end, entry.count
        if values is not None:
            at = np.array(rows)
            step.top_k[:], step.floats[:] = 1, 1.0  # of padding: what raises no error and gives no NaN
            for own, value in zip((step.steps, step.seeds, step.least, step.top_k), values[:4], strict=True):
                own[at] = value
            step.floats[:, at] = values[4:].view(np.float64)
        self.buffer[: len(staged)].copy_(self._pinned(staged), non_blocking=True)
        self.copy_tables([entry.block_table for entry in plan], rows)
        return rows

    def take_tokens(self, shape: StepShape, numbers: Sequence[int], places: Sequence[int], tokens: Tensor) -> None:
        """Take the tokens of these sequences from places of a tensor on the device, in a step of one token each."""
        both = np.array([[self.rows[number] for number in numbers], places], dtype=np.int64)
        rows, at = self._pinned(both).to(self.device, non_blocking=True)
        self.views(shape).tokens[:, 0].index_copy_(0, rows, tokens[at])

    def copy_tables(self, tables: Sequence[SequenceBlocks], rows: Sequence[int]) -> None:
        """Bring the device's block tables of these rows up to date: what was added, or all of what was edited."""
        columns = self.block_table.shape[1]
        places: list[int] = []
        values: list[int] = []
        for row, table in zip(rows, tables, strict=True):
            blocks, known = table.block_table, self._copied[row]
            now = len(blocks)
            if known[0] is table and known[2] == table.edits:
                if known[1] == now:
                    continue
                first = known[1]
            else:
                first = 0
            self._copied[row] = (table, now, table.edits)
            places += range(row * columns + first, row * columns + now)
            values += blocks[first:]
        if places:
            staged = self._pinned(np.array(places + values, dtype=np.int64)).to(self.device, non_blocking=True)
            at, value = staged.chunk(2)
            self.block_table.view(-1).scatter_(0, at, value)

    def leave(self, shape: StepShape, numbers: Sequence[int]) -> None:
        """Turn the rows of these sequences into padding, of a step that is moved on on the device."""
        if numbers:
            rows = np.array([self.rows.pop(number) for number in numbers], dtype=np.int64)
            at = self._pinned(rows).to(self.device, non_blocking=True)
            self.views(shape).lengths.index_fill_(0, at, 0)

    def _pinned(self, values: np.ndarray) -> Tensor:
        """A tensor that a GPU copies while the host goes on; PyTorch keeps its memory until it has."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


def padded(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that holds it; the next power of two beyond the last."""
    return next((one for one in sizes if one >= size), 1 << max(0, size - 1).bit_length())


def _places(sequences: int, width: int) -> list[int]:
    """Where the parts of a step begin in the buffer, and where it ends."""
    sizes = (sequences * width, *[sequences] * 6, 6 * sequences)
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return found


def _tensors(buffer: Any, sequences: int, width: int) -> StepTensors:
    """The parts of a step in a buffer: a tensor, or an array of the host."""
    places = _places(sequences, width)
    vectors = [buffer[at : at + sequences] for at in places[1:7]]
    floats = buffer[places[7] : places[7] + 6 * sequences].reshape(6, sequences)
    wide = torch.float64 if isinstance(buffer, Tensor) else np.float64
    tokens = buffer[: sequences * width].reshape(sequences, width)
    return StepTensors(*(tokens, *vectors, floats.view(wide)))
