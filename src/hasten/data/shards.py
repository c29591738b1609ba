"""Token shards on disk: raw little-endian numbers, memory-mapped, with nothing in them but the tokens.

A split is `<split>-00000.bin`, `-00001.bin`, ... (uint16 or uint32), `<split>.starts.bin` (int64: where each document
begins), and for chat `<split>-00000.weights.bin`, ... (uint8, one a token). Their sizes are in the manifest.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from hasten.errors import DataError

SHARD_TOKENS = 1 << 27  # 256 MiB of uint16: few files, each small enough to copy and map anywhere


class MappedArray(Sequence[Any]):
    """Several one-dimensional arrays seen as one, without joining them. Indexing gives numpy values and arrays."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]], *, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([0, *(len(part) for part in self._parts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

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
        """Elements start..stop; a view where they lie in one part, a copy where they span several."""
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
        return len(self.document_starts)

    def document_numbers(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """(length,) int64: for each token from `start` on, how many documents began after `start`: 0, 0, 1, 1, 1, 2.

        Past the end it goes on at the beginning of the split, as packed windows do.
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


@dataclass(slots=True)
class ShardWriter:
    """Writes one split of `folder`, an array at a time. `close()` gives its entry in the manifest."""

    folder: Path
    split: str
    dtype: np.dtype[Any]
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    learned: int = 0
    _shards: list[dict[str, Any]] = field(default_factory=list)
    _files: dict[str, IO[bytes]] = field(default_factory=dict)  # the open ones: tokens, weights, starts

    def begin_document(self) -> None:
        if "starts" not in self._files:
            self._open("starts", f"{self.split}.starts.bin")
        self._files["starts"].write(np.array([self.tokens], "<i8").tobytes())
        self.documents += 1

    def add(self, ids: Sequence[int], *, weights: Sequence[int] | None = None) -> None:
        """Append tokens. weights: 0 or 1 a token; once a split has some, the tokens without them all count (1)."""
        array = np.array(ids, np.int64)
        highest = np.iinfo(self.dtype).max
        assert array.size == 0 or (array.min() >= 0 and array.max() <= highest), f"ids outside 0..{highest}"
        if not self._shards or self._shards[-1]["tokens"] >= SHARD_TOKENS:
            self._begin_shard()
        if weights is not None and not self.weighted:
            self._begin_weights()
        self._files["tokens"].write(array.astype(self.dtype).tobytes())
        if self.weighted:
            mask = np.ones(len(array), np.uint8) if weights is None else np.array(weights, np.uint8)
            assert len(mask) == len(array), "one weight a token"
            self._files["weights"].write(mask.tobytes())
            self.learned += int(mask.sum())
        self._shards[-1]["tokens"] += len(array)
        self.tokens += len(array)

    def _begin_shard(self) -> None:
        weighted = self.weighted
        self._close("tokens", "weights")
        name = f"{self.split}-{len(self._shards):05d}.bin"
        self._shards.append({"file": name, "tokens": 0})
        self._open("tokens", name)
        if weighted:
            self._open("weights", self._name_weights(self._shards[-1]))

    def _begin_weights(self) -> None:
        """The first chat after plain texts: everything until now counts."""
        for shard in self._shards:
            (self.folder / self._name_weights(shard)).write_bytes(b"\1" * shard["tokens"])
        self._open("weights", self._shards[-1]["weights"], mode="ab")
        self.learned = self.tokens

    @staticmethod
    def _name_weights(shard: dict[str, Any]) -> str:
        name: str = shard["file"].replace(".bin", ".weights.bin")
        shard["weights"] = name
        return name

    @property
    def weighted(self) -> bool:
        return bool(self._shards) and "weights" in self._shards[-1]

    def _open(self, kind: str, name: str, *, mode: str = "wb") -> None:
        self._files[kind] = cast(IO[bytes], (self.folder / name).open(mode))

    def _close(self, *kinds: str) -> None:
        for kind in kinds:
            if kind in self._files:
                with self._files.pop(kind) as file:
                    file.flush()
                    os.fsync(file.fileno())

    def abort(self) -> None:
        """Close the files; what is in them does not matter."""
        for file in self._files.values():
            with suppress(OSError):  # the disk is full: that is why we are here
                file.close()

    def close(self) -> dict[str, Any]:
        self._close("tokens", "weights", "starts")
        entry = {"documents": self.documents, "bytes": self.text_bytes, "tokens": self.tokens, "shards": self._shards}
        return entry | ({"learned_tokens": self.learned} if self.weighted else {})


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
        tokens=MappedArray(tokens, dtype=kind),
        document_starts=starts,
        weights=MappedArray(weights, dtype=np.uint8) if weights else None,
        bytes=entry["bytes"],
        name=split,
    )


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
    """What to do about a damaged folder of shards."""
    return f"delete {folder} and prepare the data again, or use another folder"
