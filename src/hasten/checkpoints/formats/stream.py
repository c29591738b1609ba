"""Writing a safetensors file one tensor at a time: only the one at hand is in memory.

Layout (https://huggingface.co/docs/safetensors): 8 bytes, the header's length (little endian); the header, JSON padded
with spaces; the tensors' bytes. Tensors of wide elements come first, so that every one is aligned to its element.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hasten.checkpoints.checkpoint import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8"}


def write_file(
    specs: Mapping[str, Tensor],
    path: Path,
    *,
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file that holds exactly the tensors of `specs`, which `tensors` yields by name in any order.

    specs: tensors of their dtypes and shapes, on the meta device where they are still to be made. metadata: texts
    in the header beside them. The data is on the disk (fsync) when this returns. Raises OSError where it cannot be
    written.
    """
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    places, end = {}, 0
    for name in order:
        spec, begin = specs[name], end
        end += spec.nbytes
        places[name] = begin
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        written = set()
        for name, tensor in tensors:
            spec = specs[name]
            assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape), name
            file.seek(start + places[name])
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            written.add(name)
        assert written == set(specs)
        file.truncate(start + end)  # where the last tensors are empty
        file.flush()
        os.fsync(file.fileno())
