"""The header of a GGUF file, checked against the file before anything is allocated; the weights stay in the file.

Layout, little endian: "GGUF", the version (2 or 3), how many tensors and how many metadata entries there are; each
entry's key, type and value; each tensor's name, shape (innermost first), type and place; padding; then the tensors'
bytes, one after the other, each padded to the alignment.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoints.gguf.choose import parts_of
from hasten.checkpoints.gguf.types import TYPE_NAMES, TYPES, TensorType
from hasten.errors import CheckpointError
from hasten.machine.regular_files import open_regular

MAX_ENTRIES = 1 << 16  # of metadata, and of tensors; published files have tens and hundreds
MAX_TEXT_BYTES = 1 << 24  # of one text; chat templates have thousands
MAX_TEXTS = 1 << 22  # in one list; vocabularies have up to 2^18
MAX_RANK = 4
MAX_ELEMENTS = 1 << 48  # of a tensor

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file: shape (outermost first), type, the byte of the data where it begins, and of which part."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int = 0
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: of the innermost dimension."""
        return self.shape[-1] // self.type.elements * self.type.bytes

    @property
    def bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model's metadata (numbers, texts, lists of texts, numpy arrays of numbers) and tensors, by name.

    data: each file behind its header, uint8, memory-mapped. The mapping is private: what is written to it never reaches
    the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    data: tuple[Tensor, ...]

    def raw(self, name: str) -> Tensor:
        """A tensor's bytes, uint8 (rows, bytes of a row), as in the file."""
        tensor = self.tensors[name]
        return self.data[tensor.part][tensor.begin : tensor.begin + tensor.bytes].view(-1, tensor.row_bytes)


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and read its header; of a split model, given any part, all of them. CheckpointError says what is
    wrong, and what to do.
    """
    found = _read_part(path)
    count = found.metadata.get("split.count", 0)
    if type(count) is not int or count < 2:
        return found
    names, number = parts_of(path.name), found.metadata.get("split.no")
    if len(names) != count:
        number = number + 1 if type(number) is int else 1
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, and parts are found by their names: call this one "
            f"NAME-{number:05}-of-{count:05}.gguf, and the others alike"
        )
    files = [path.with_name(name) for name in names]
    if missing := [file.name for file in files if not file.exists()]:
        raise CheckpointError(f"{path} is one of {count} parts of a model; {missing[0]} is not beside it: download it")
    return _joined(path, [found if file == path else _read_part(file) for file in files])


def _joined(path: Path, parts: list[GGUFFile]) -> GGUFFile:
    """The parts of a split model as one; the first has the metadata."""
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        said = part.metadata.get("split.no"), part.metadata.get("split.count")
        if said != (number, len(parts)):
            raise CheckpointError(
                f"{part.path} says that it is part {said[0]!s:.20} (from 0) of {said[1]!s:.20}, not part {number} of "
                f"{len(parts)}: its name is wrong, or the parts are of several models; download them again"
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path}: the tensor {min(twice)!r:.100} is in another part too")
        tensors |= {name: replace(tensor, part=number) for name, tensor in part.tensors.items()}
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{path}: its parts hold {len(tensors)} tensors, not {expected!s:.20}; download them again"
        )
    return GGUFFile(path, parts[0].metadata, tensors, tuple(part.data[0] for part in parts))


def _read_part(path: Path) -> GGUFFile:
    file, size = open_regular(path, f"there is no file {path}")
    with file:
        first = file.read(8)
    if first[:4] != b"GGUF" or size < 24:
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {first[:4]!r}; download it again")
    version = int.from_bytes(first[4:], "little")
    if version not in (2, 3):
        fault = "it is big-endian" if version > 1 << 16 else f"it is of version {version}, and 2 and 3 are read"
        raise CheckpointError(f"{path}: {fault}; convert the model again with today's llama.cpp")
    try:
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise CheckpointError(f"{path} cannot be mapped: {error!s:.200}") from None
    return _Reader(path, data).read()


def shortest(value: float) -> float:
    """The shortest number that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _Reader:
    """Goes through a header once. Every count is compared with the bytes that are left before it is believed."""

    def __init__(self, path: Path, data: Tensor) -> None:
        self.path, self.data = path, data
        self.raw = memoryview(cast(Any, data.numpy()))
        self.at = 8

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}; the file is damaged, download it again")

    def read(self) -> GGUFFile:
        tensors, entries = self.count("tensors", MAX_ENTRIES, 24), self.count("metadata entries", MAX_ENTRIES, 13)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.text()
            if key in metadata:
                self.fail(f"the metadata entry {key!r:.100} is in it twice")
            metadata[key] = self.value(key, self.number("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in (8 << i for i in range(14)):
            self.fail(f"general.alignment is {alignment!r:.40}, no power of two from 8 to 65,536")
        found = [self.tensor() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        end = 0  # of the tensor before
        for tensor in found:
            name = f"the tensor {tensor.name!r:.100}"
            if tensor.name in placed:
                self.fail(f"{name} is in it twice")
            if tensor.begin != -(-end // alignment) * alignment:
                self.fail(f"{name} begins at byte {tensor.begin:,}, and the one before it ends at {end:,}")
            end = tensor.begin + tensor.bytes
            if start + end > len(self.raw):
                self.fail(f"{name} ends at byte {start + end:,}, and the file has {len(self.raw):,}")
            placed[tensor.name] = tensor
        if (behind := len(self.raw) - start - (-(-end // alignment) * alignment)) > 0:
            self.fail(f"{behind:,} bytes follow the last tensor")
        return GGUFFile(self.path, metadata, placed, (self.data[start:],))

    def take(self, size: int) -> memoryview:
        if size > len(self.raw) - self.at:
            self.fail(f"at byte {self.at:,} it claims {size:,} more, and has {len(self.raw) - self.at:,}")
        self.at += size
        return self.raw[self.at - size : self.at]

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
        return shortest(value) if code == "f" else value

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """Read a number of things of at least `least_bytes` each."""
        count = self.number("Q")
        if count > most or count * least_bytes > len(self.raw) - self.at:
            self.fail(f"it claims {count:,} {what}, which do not fit its {len(self.raw):,} bytes (at most {most:,})")
        return count

    def text(self) -> str:
        size = self.count("bytes of text", MAX_TEXT_BYTES, 1)
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            self.fail(f"the text at byte {self.at - size:,} is not UTF-8")

    def texts(self, count: int) -> list[str]:
        """Several texts in a row, in one loop: a vocabulary has a quarter of a million."""
        found, raw, at, length = [], self.raw, self.at, struct.Struct("<Q").unpack_from
        end = len(raw)
        try:
            for _ in range(count):
                start = at + 8
                stop = start + length(raw, at)[0]
                if stop > end or stop - start > MAX_TEXT_BYTES:
                    break
                found.append(str(raw[start:stop], "utf-8"))
                at = stop
        except (struct.error, UnicodeDecodeError):
            pass
        self.at = at
        if len(found) < count:
            self.text()  # says what is wrong with the next one
        return found

    def value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        inner = self.number("I") if kind == _ARRAY else kind
        if inner == _TEXT:
            return self.texts(self.count(f"texts in {key:.100}", MAX_TEXTS, 8))
        if inner not in _NUMBERS:
            self.fail(f"{key!r:.100} is {'a list of lists' if inner == _ARRAY else f'of the unknown type {inner}'}")
        dtype = np.dtype(_NUMBERS[inner]).newbyteorder("<")
        count = self.count(f"numbers in {key:.100}", len(self.raw), dtype.itemsize)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor(self) -> GGUFTensor:
        """A tensor, which begins in the data where it says."""
        name, rank = self.text(), self.number("I")
        if not 1 <= rank <= MAX_RANK:
            self.fail(f"the tensor {name!r:.100} has {rank} dimensions, and 1 to {MAX_RANK} are known")
        shape = tuple(reversed([self.number("Q") for _ in range(rank)]))
        kind, offset = self.number("I"), self.number("Q")
        if min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS:
            self.fail(f"the tensor {name!r:.100} has the shape {list(shape)}")
        known = TYPE_NAMES[kind] if kind < len(TYPE_NAMES) else str(kind)
        if known not in TYPES:
            raise CheckpointError(
                f"{self.path}: the tensor {name!r:.100} is of type {known}, which hasten does not read; it reads "
                f"{', '.join(TYPES)}: download the model in one of these, or make one with llama-quantize of llama.cpp "
                f"(llama-quantize --allow-requantize {self.path} OUTPUT.gguf Q8_0)"
            )
        if shape[-1] % TYPES[known].elements:
            self.fail(f"the tensor {name!r:.100} has rows of {shape[-1]:,} numbers, which {known} cannot hold")
        return GGUFTensor(name, TYPES[known], shape, offset)
