"""Batches for training and evaluation: packed windows of tokens, each a pure function of its position.

A split of texts is one long ring of tokens, documents back to back. An epoch cuts it into windows of `sequence_length`
tokens, from an offset that changes with the epoch, and visits them in a shuffled order. A split with conversations has
windows of whole ones (`packing.py`), the same in every epoch. No state is carried from batch to batch: batch number
1,000 is computed without the 999 before it. So resuming is exact and workers cannot change it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hasten.data.packing import Packing, pack
from hasten.data.shards import TokenSplit
from hasten.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

IGNORED = -100  # targets without loss, as torch.nn.functional.cross_entropy has it
_LOOK_AHEAD = 2  # batches that each worker prepares before they are requested
_MASK = (1 << 64) - 1
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of B rows of T tokens.

    inputs: (B, T) int64. targets: (B, T) int64, the token after each input; -100 where there is no loss. documents:
    (B, T) int64 or None, the document of each input token, counted from 0 in each row.
    """

    inputs: "torch.Tensor"
    targets: "torch.Tensor"
    documents: "torch.Tensor | None"

    def to(self, device: Any, *, non_blocking: bool = False) -> "Batch":
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def only(self, rows: slice) -> "Batch":
        """A batch with some of the rows."""
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: "Callable[[torch.Tensor], torch.Tensor]") -> "Batch":
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.inputs), change(self.targets), documents)


@dataclass(slots=True)
class Batches:
    """Training batches of one rank: row b of batch p on rank r is number (p·W + r)·B + b in an endless list of windows.

    In that list every `windows` rows are one epoch: each window once. Ranks therefore never share a row, and with
    the same B·W the data is the same for any number of ranks (in another order of rows).

    split: the tokens; of texts at least sequence_length + 1. workers: threads that prepare batches ahead (reading
    mapped files releases the GIL); 0: each batch is made when it is requested. shuffle=False: windows in order.
    documents: number the documents of each row, for attention that stays inside them.
    Raises DataError for a split shorter than one window, ConfigError for numbers that cannot work.
    """

    split: TokenSplit
    _: KW_ONLY
    batch_size: int
    sequence_length: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    shuffle: bool = True
    documents: bool = True
    tokens: int = field(init=False)  # of the split
    windows: int = field(init=False)  # of one epoch; the ring gives every window its last target
    packing: Packing | None = field(init=False)  # of a split with conversations

    def __post_init__(self) -> None:
        _check_sizes(batch_size=self.batch_size, sequence_length=self.sequence_length)
        if self.split.weights is None:
            _check_length(self.split, self.sequence_length)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of {self.world_size} does not exist; ranks count from 0")
        if self.workers < 0:
            raise ConfigError(f"workers is {self.workers}; give 0 or more")
        packed = self.split.weights is not None
        self.packing = pack(self.split, length=self.sequence_length) if packed else None
        self.tokens = len(self.split)
        self.windows = self.tokens // self.sequence_length if self.packing is None else len(self.packing.starts)

    def window(self, row: int) -> tuple[int, int]:
        """Start in the split, and number of tokens, of row number `row` of the endless list."""
        epoch, index = divmod(row, self.windows)
        if self.packing is not None:
            index = Permutation(self.windows, mix(self.seed, epoch, 2))[index] if self.shuffle else index
            return int(self.packing.starts[index]), int(self.packing.counts[index])
        whole = self.sequence_length + 1
        if not self.shuffle:
            return index * self.sequence_length, whole
        # The offset moves the windows' borders, and the few tokens that no window of this epoch covers.
        offset = mix(self.seed, epoch, 1) % self.tokens
        window = Permutation(self.windows, mix(self.seed, epoch, 2))[index]
        return (offset + window * self.sequence_length) % self.tokens, whole

    def batch(self, position: int) -> Batch:
        """Batch number `position` (from 0): depends on nothing but the arguments of this object and `position`."""
        if position < 0:
            raise ConfigError(f"position is {position}; batches count from 0")
        first = (position * self.world_size + self.rank) * self.batch_size
        windows = [self.window(first + row) for row in range(self.batch_size)]
        return _assemble(self.split, windows, length=self.sequence_length, numbered=self.documents)

    def iterate(self, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield (position, batch) from `start` on, without end. Closing the iterator stops the workers."""
        if self.workers == 0:
            for position in count(start):
                yield position, self.batch(position)
        ahead: deque[Future[Batch]] = deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="hasten-batches")
        try:
            for position in count(start):
                while len(ahead) < self.workers * _LOOK_AHEAD:
                    ahead.append(pool.submit(self.batch, position + len(ahead)))
                yield position, ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def evaluation_windows(split: TokenSplit, *, batch_size: int, sequence_length: int) -> Iterator[Batch]:
    """Yield the split once, in order, in windows that do not overlap: every token but the first is a target once.

    Conversations come as they are packed. All batches are (batch_size, sequence_length), so that a compiled model sees
    one shape; padding has the target -100. Raises DataError for a split
    without two tokens, or without an answer that fits.
    """
    _check_sizes(batch_size=batch_size, sequence_length=sequence_length)
    windows = evaluated(split, sequence_length=sequence_length)
    for first in range(0, len(windows), batch_size):
        own = windows[first : first + batch_size]
        yield _assemble(split, own, length=sequence_length, rows=batch_size)


def evaluated(split: TokenSplit, *, sequence_length: int) -> list[tuple[int, int]]:
    """The windows of `evaluation_windows`: the first token of each, and how many it has."""
    if split.weights is not None:
        packing = pack(split, length=sequence_length)
        return list(zip(packing.starts.tolist(), packing.counts.tolist(), strict=True))
    if len(split) < 2:
        raise DataError(
            f"the {split.name} split has {len(split):,} tokens, and a loss takes two; give more text, or a larger "
            "validation_fraction (0: no validation)"
        )
    return [(at, min(sequence_length + 1, len(split) - at)) for at in range(0, len(split) - 1, sequence_length)]


def _check_sizes(*, batch_size: int, sequence_length: int) -> None:
    if batch_size < 1 or sequence_length < 1:
        raise ConfigError(f"batch_size {batch_size} and sequence_length {sequence_length} must both be at least 1")


def _check_length(split: TokenSplit, sequence_length: int) -> None:
    if len(split) < sequence_length + 1:
        raise DataError(
            f"the {split.name} split has {len(split):,} tokens ({split.documents:,} documents), and one window of "
            f"sequence_length {sequence_length:,} takes {sequence_length + 1:,}; give more text or a shorter "
            f"sequence_length (hasten train: --data.context, at most {len(split) - 1:,})"
        )


def _assemble(
    split: TokenSplit,
    windows: Sequence[tuple[int, int]],
    *,
    length: int,
    rows: int | None = None,
    numbered: bool = True,
) -> Batch:
    """Assemble rows from windows (start, number of tokens); the rest of a row is padding without targets.

    numbered: with the number of each token's document.
    """
    import torch

    rows = len(windows) if rows is None else rows
    tokens = np.zeros((rows, length + 1), np.int64)
    targets = np.full((rows, length), IGNORED, np.int64)
    documents = np.zeros((rows, length), np.int64) if numbered else None
    for row, (start, size) in enumerate(windows):
        tokens[row, :size] = _read(split.tokens, start, size)
        targets[row, : size - 1] = tokens[row, 1:size]
        if split.weights is not None:
            learned = _read(split.weights, start, size)[1:] != 0
            targets[row, : size - 1][~learned] = IGNORED
        if documents is not None:
            there = min(size, length)
            documents[row, :there] = split.document_numbers(start, there)
            documents[row, there:] = documents[row, there - 1] + 1
    return Batch(
        inputs=torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
        targets=torch.from_numpy(targets),
        documents=None if documents is None else torch.from_numpy(documents),
    )


def _read(array: Any, start: int, count: int) -> npt.NDArray[Any]:
    """Read `count` elements from `start` on, wrapping around at the end."""
    tail = array[start : start + count]
    return tail if len(tail) == count else np.concatenate([tail, array[: count - len(tail)]])


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers, the same on every machine (the finalizer of splitmix64; Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class Permutation:
    """A random permutation of 0..size-1, chosen by `key` and computed element by element, without a list of them.

    A Feistel network, walked until it is back in range.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), the cycle-walking cipher.
    """

    size: int
    key: int

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size, (index, self.size)
        half = ((self.size - 1).bit_length() + 1) // 2
        low_bits = (1 << half) - 1
        while True:
            left, right = index >> half, index & low_bits
            for turn in range(_ROUNDS):
                left, right = right, left ^ (mix(self.key, turn, right) & low_bits)
            index = left << half | right
            if index < self.size:  # at most four tries on average: the domain is less than 4 × size
                return index
