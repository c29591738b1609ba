"""Token shards on disk: memory-mapped files of raw little-endian numbers without a header.

A split is `<split>-00000.bin`, `-00001.bin`, ... (uint16 or uint32), `<split>.starts.bin` (int64: where each document
begins), and for chat `<split>-00000.weights.bin`, ... (uint8, one a token). Their sizes are in the manifest.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hasten.errors import DataError

SHARD_TOKENS = 1 << 27  # 256 MiB of uint16: few files, each small enough to copy and map anywhere


class MappedArray(Sequence[Any]):
    """Presents several one-dimensional arrays as one, without copying. Indexing gives numpy values and arrays."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]], *, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([0, *(len(part) for part in self._parts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            position = range(len(self))[index]  # negative ones and IndexError, as a list has them
            return self.read(position, position + 1)[0]
        start, stop, step = index.indices(len(self))
        if step == 1:
            return self.read(start, max(start, stop))
        return np.array([self[i] for i in range(start, stop, step)], self.dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.read(0, len(self)), dtype=dtype, copy=copy)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements start..stop: a view if they are in one part, a copy if they span several."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        if start == stop:
            return np.empty(0, self.dtype)
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        last = int(np.searchsorted(self._ends, stop, side="left")) - 1
        pieces = [
            self._parts[i][max(0, start - int(self._ends[i])) : stop - int(self._ends[i])]
            for i in range(first, last + 1)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """The tokens of one split, documents back to back, each ended by the separator.

    tokens: (N,) uint16 or uint32. document_starts: (D,) int64, rising, the first is 0 (empty for an empty split).
    weights: (N,) uint8 or None; 0 where a token is not to be learned (all but the assistant's words of a chat).
    bytes: UTF-8 bytes of the text, without the separators. name: train or validation.
    """

    tokens: MappedArray | npt.NDArray[Any]
    document_starts: npt.NDArray[np.int64]
    weights: MappedArray | npt.NDArray[np.uint8] | None = None
    bytes: int = 0
    name: str = "given"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_starts)

    def document_numbers(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """(length,) int64: for each token from `start` on, how many documents began after `start`: 0, 0, 1, 1, 1, 2.

        Past the end it continues at the beginning of the split, as packed windows do.
        """
        marks = np.zeros(length, np.int64)
        done, first = 0, start
        while done < length:
            stop = min(len(self), first + length - done)
            # The first token is of document 0 whether or not one begins there; a wrapped part begins a new one.
            low = np.searchsorted(self.document_starts, first, side="right" if done == 0 else "left")
            high = np.searchsorted(self.document_starts, stop)
            marks[np.asarray(self.document_starts[low:high]) - first + done] = 1
            done, first = done + stop - first, 0
        return np.cumsum(marks)


class _Stream:
    """Writes numbers of one kind to numbered files; a file is created with its first number.

    name: file name, with a placeholder for the file's index. most: numbers in a file, after which the next one begins.
    counts: numbers in each file.
    """

    def __init__(self, folder: Path, name: str, dtype: npt.DTypeLike, *, most: float = math.inf) -> None:
        self.folder, self.name, self.dtype, self.most = folder, name, np.dtype(dtype), most
        self.counts: dict[str, int] = {}
        self._last = ""
        self._file: IO[bytes] | None = None

    def write(self, numbers: npt.NDArray[Any]) -> None:
        if self._file is None or self.counts[self._last] >= self.most:
            self.close()
            self._last = self.name.format(len(self.counts))
            self._file = (self.folder / self._last).open("wb")
            self.counts[self._last] = 0
        self._file.write(numbers.astype(self.dtype).tobytes())
        self.counts[self._last] += len(numbers)

    def close(self) -> None:
        """Close the file; its data is on the disk (fsync) on return."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.flush()
                os.fsync(file.fileno())


class ShardWriter:
    """Writes one split of `folder`, an array at a time. `close()` returns its entry in the manifest."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.documents = self.tokens = self.text_bytes = self.learned = 0
        self._tokens = _Stream(folder, split + "-{:05d}.bin", dtype, most=SHARD_TOKENS)
        self._weights = _Stream(folder, split + "-{:05d}.weights.bin", np.uint8, most=SHARD_TOKENS)
        self._starts = _Stream(folder, f"{split}.starts.bin", "<i8")

    def begin_document(self) -> None:
        """Begin a document with the next token."""
        self._starts.write(np.array([self.tokens]))
        self.documents += 1

    def add(self, ids: Sequence[int], *, weights: Sequence[int] | None = None) -> None:
        """Append tokens. weights: 0 or 1 a token; once a split has some, the tokens without them all count (1)."""
        array = np.array(ids, np.int64)
        highest = np.iinfo(self.dtype).max
        assert array.size == 0 or (array.min() >= 0 and array.max() <= highest), f"ids outside 0..{highest}"
        if weights is not None and not self._weights.counts:  # the first chat: plain texts until now count
            for count in self._tokens.counts.values():
                self._weights.write(np.ones(count, np.uint8))
            self.learned = self.tokens
        self._tokens.write(array)
        if weights is not None or self._weights.counts:
            mask = np.ones(len(array), np.uint8) if weights is None else np.array(weights, np.uint8)
            assert len(mask) == len(array), "one weight a token"
            self._weights.write(mask)
            self.learned += int(mask.sum())
        self.tokens += len(array)

    def abort(self) -> None:
        """Close the files without completing them."""
        for stream in (self._tokens, self._weights, self._starts):
            with suppress(OSError):  # the disk is full: that is why we are here
                stream.close()

    def close(self) -> dict[str, Any]:
        """Complete the files; returns the split's entry in the manifest."""
        for stream in (self._tokens, self._weights, self._starts):
            stream.close()
        shards: list[dict[str, Any]] = [{"file": name, "tokens": n} for name, n in self._tokens.counts.items()]
        for shard, name in zip(shards, self._weights.counts, strict=False):
            shard["weights"] = name
        entry = {"documents": self.documents, "bytes": self.text_bytes, "tokens": self.tokens, "shards": shards}
        return entry | ({"learned_tokens": self.learned} if self._weights.counts else {})


def open_split(folder: Path, *, split: str, entry: dict[str, Any], dtype: str) -> TokenSplit:
    """Map a split that `ShardWriter` wrote. Raises DataError for a missing file or one of another size."""
    kind = np.dtype(dtype).newbyteorder("<")
    tokens = [_map(folder / shard["file"], kind, shard["tokens"]) for shard in entry["shards"]]
    weights = [
        _map(folder / shard["weights"], np.dtype(np.uint8), shard["tokens"])
        for shard in entry["shards"]
        if "weights" in shard
    ]
    starts = _map(folder / f"{split}.starts.bin", np.dtype("<i8"), entry["documents"])
    return TokenSplit(
        tokens=_joined(tokens, kind),
        document_starts=starts,
        weights=_joined(weights, np.dtype(np.uint8)) if weights else None,
        bytes=entry["bytes"],
        name=split,
    )


def _joined(parts: list[npt.NDArray[Any]], dtype: np.dtype[Any]) -> MappedArray | npt.NDArray[Any]:
    """The mapped file, or several of them as one array."""
    return parts[0] if len(parts) == 1 else MappedArray(parts, dtype=dtype)


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype)
    expected = count * dtype.itemsize
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy(path.parent)}") from error
    if found != expected:
        raise DataError(f"{path}: has {found:,} bytes, the manifest says {expected:,}; {remedy(path.parent)}")
    return np.memmap(path, dtype, mode="r", shape=(count,))


def remedy(folder: Path) -> str:
    """Advice for a damaged folder of shards."""
    return f"delete {folder} and prepare the data again, or use another folder"
