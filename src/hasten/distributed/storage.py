"""Checkpoint storage in safetensors files: each rank writes a file with its parts, any number of ranks can read them.

torch.distributed.checkpoint plans which rank writes and reads what. Its own files keep their metadata in a pickle; here
the header of each file says, as JSON, where its parts belong in the whole tensors, and a tensor that is not listed is
whole. So a file written by a single process is an ordinary safetensors file.
"""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hasten.checkpoints.checkpoint import DTYPES, read_header
from hasten.checkpoints.formats.stream import NAMES
from hasten.distributed.parts import PLACES, Part
from hasten.errors import CheckpointError

_DTYPES = {name: dtype for dtype, name in NAMES.items()} | DTYPES


def own_parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """The parts that this rank writes: of replicated tensors and of DTensors. Called on every rank at once."""
    collected = _Collector()
    save(dict(tensors), storage_writer=collected)
    return collected.parts


def read(files: Sequence["StoredFile"], tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, or this rank's parts of DTensors, by name, in place. Raises CheckpointError for a damaged file."""
    _read(Reader(files), tensors)


def reader_of_whole(files: Sequence["StoredFile"]) -> Callable[[str], Tensor]:
    """What reads a whole tensor by its name, put together from all files. It raises CheckpointError as `read` does."""
    reader = Reader(files)

    def whole(name: str) -> Tensor:
        about = reader.metadata.state_dict_metadata[name]
        assert isinstance(about, TensorStorageMetadata)
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        _read(reader, {name: tensor})
        return tensor

    return whole


def _read(reader: "Reader", tensors: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():  # torch warns that each rank reads for itself
        warnings.simplefilter("ignore")
        try:
            load({name: one.detach() for name, one in tensors.items()}, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{reader.folder} cannot be read ({reason})") from None


class StoredFile:
    """An open file whose header was checked. parts: (whole shape, place) by name. prefix: put before every name."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path, self.prefix = path, prefix
        header = read_header(path)
        try:
            with safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
            self.parts = {name: _checked(one.shape, *places.get(name, [one.shape, [0] * len(one.shape)]))
                          for name, one in header.items()}  # fmt: skip
            self.dtypes = {name: _DTYPES[one.dtype] for name, one in header.items()}
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None


def _checked(size: Sequence[int], shape: Sequence[int], offsets: Sequence[int]) -> tuple[Any, Any]:
    """Shape of the whole tensor and place of the part, as torch's types. Raises ValueError for an impossible place."""
    fits = len(size) == len(shape) == len(offsets) and all(type(n) is int and n >= 0 for n in (*shape, *offsets))
    if not fits or any(first + count > all_ for first, count, all_ in zip(offsets, size, shape, strict=True)):
        raise ValueError(f"a part {list(size)} at {offsets} of {shape}")
    return torch.Size(shape), ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))


def table(files: Sequence[StoredFile]) -> Metadata:
    """Metadata of all tensors in the files. Raises CheckpointError if the parts of a tensor do not cover it."""
    found: dict[str, Any] = {}
    places = {}
    for file in files:
        for name, (shape, chunk) in file.parts.items():
            full = file.prefix + name
            one = found.setdefault(full, TensorStorageMetadata(TensorProperties(file.dtypes[name]), shape, []))
            if one.size != shape or one.properties.dtype != file.dtypes[name]:
                raise CheckpointError(f"{file.path} is damaged: its part of {name} belongs to another tensor")
            one.chunks.append(chunk)
            places[MetadataIndex(full, chunk.offsets)] = (file.path, name)
    for full, one in found.items():
        offsets = {chunk.offsets for chunk in one.chunks}
        held = sum(math.prod(chunk.sizes) for chunk in one.chunks)
        if held != math.prod(one.size) or len(offsets) != len(one.chunks):
            raise CheckpointError(f"{files[0].path.parent} is damaged: the parts of {full} do not cover it")
    return Metadata(found, storage_data=places)


class _Collector(StorageWriter):
    """Collects the parts that the planner assigns to this rank, and writes nothing."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        for item in plan.items:
            about = item.tensor_data
            data = planner.resolve_data(item)
            self.parts.append(Part(item.index.fqn, tuple(about.size), tuple(about.chunk.offsets), data))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def finish(self, metadata: Metadata, results: Any) -> None: ...
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Reads the rows that the planner asks for from files whose headers were checked."""

    def __init__(self, files: Sequence[StoredFile]) -> None:
        self.folder = files[0].path.parent
        self.metadata = table(files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            path, name = self.metadata.storage_data[item.storage_index]
            by_file[path].append((name, item))
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name, item in wanted:
                    rows = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                    data = file.get_slice(name)[rows] if rows else file.get_tensor(name)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(data)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
