"""Reading a checkpoint folder that may be damaged or hostile: everything is checked before memory is allocated.

safetensors only; a pickle is never opened. Tensors are views of the memory-mapped file, so a weight in its own dtype
costs no second copy.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hasten.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it: nothing of it is in memory yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES.get(self.dtype, 1)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; CheckpointError says which file is missing or where it is malformed."""
    try:
        if path.stat().st_size > _MAX_HEADER:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes are too many for a configuration file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a Hugging Face model folder") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; found {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, checked against the file's size. Reads the header only."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if len(first) < 8 or length > min(size - 8, _MAX_HEADER):
                pickled = first[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK")
                hint = " (it looks like a pickle: convert it with transformers' save_pretrained)" if pickled else ""
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: its header claims {length:,} bytes, "
                    f"the file has {size:,}{hint}"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} lacks the file {path.name}; download or copy it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, value, size - 8 - length) for name, value in header.items()}


def _entry(path: Path, name: str, value: Any, data_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) or begin > end:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header's entry for {name!r:.100} is malformed") from None
    if end > data_bytes:
        raise CheckpointError(
            f"{path} is truncated: {name!r:.100} ends at byte {end:,} of the data, and there are {data_bytes:,}"
        )
    stored = StoredTensor(name, dtype, shape, path)
    if dtype in _BYTES and stored.bytes != end - begin:
        raise CheckpointError(
            f"{path}: {name!r:.100} of shape {list(shape)} in {dtype} needs {stored.bytes:,} bytes; the header gives "
            f"it {end - begin:,}"
        )
    return stored


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder, from its one file or from every shard its index names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        stored: dict[str, StoredTensor] = {}
        for file in sorted(set(names.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index} names the file {file!r:.100}; only .safetensors files in the same folder are read"
                )
            stored |= read_header(folder / file)
        for name, file in names.items():
            if name not in stored:
                raise CheckpointError(f"{index} says that {name!r:.100} stands in {file}, and it does not")
        return stored
    single = folder / "model.safetensors"
    if single.exists():
        return read_header(single)
    pickles = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        raise CheckpointError(
            f"{folder} holds {pickles[0]}, a pickle, which can run code when opened; hasten reads safetensors only. "
            "Convert it where you trust it: transformers' AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


class MappedTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, each a view of its memory-mapped file."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self._files: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self.stored[name].file
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            return self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name!r:.100} cannot be read: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Raise CheckpointError if the tensor holds NaN or infinity. One pass of reading, no copy."""
    if tensor.is_meta or math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:  # else only the sum overflowed
        raise CheckpointError(
            f"{where}: {name} holds {bad:,} values that are NaN or infinite, of {tensor.numel():,}; "
            "the checkpoint is damaged or was saved from a diverged run"
        )
