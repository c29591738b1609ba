"""Parts of tensors in safetensors files, whose headers say where each part belongs in the whole tensor."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hasten.checkpoints.formats.stream import write_file

PLACES = "hasten_parts"  # in a header, as JSON: {name: [shape of the whole, offsets]}; tensors not listed are whole


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, or all of it, that one rank writes.

    shape: the whole tensor's. offsets: position of the part's first element in the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor

    @classmethod
    def whole(cls, name: str, data: Tensor) -> "Part":
        """A part that is the whole tensor."""
        return cls(name, tuple(data.shape), (0,) * data.dim(), data)


def write(path: Path, parts: Iterable[Part]) -> None:
    """Write a safetensors file, one tensor at a time. Raises OSError."""
    parts = list(parts)
    places = {part.name: [part.shape, part.offsets] for part in parts if part.data.shape != part.shape}
    metadata = {PLACES: json.dumps(places)} if places else {}
    data = {part.name: part.data for part in parts}
    write_file(data, path, tensors=((name, one.detach().cpu()) for name, one in data.items()), metadata=metadata)
