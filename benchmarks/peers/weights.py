"""Bytes of weights that a program reads for a token: all in its files, less the embedding, of which it reads a row.

Only headers are read. A tied embedding is the head's matrix too, and then is counted. Of a GGUF file's experts those
are counted that a token takes.
"""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree


def bytes_read(model: Path) -> int:
    """Bytes that a token reads of a GGUF file, an OpenVINO export or a folder of safetensors (on disk, with scales)."""
    if model.is_file():
        return _without_embedding(gguf(model), "token_embd.", r"^output\.")
    if (model / "openvino_model.xml").exists():
        return _without_embedding(openvino(model / "openvino_model.xml"), "embed_tokens.", r"lm_head\.")
    sizes = {name: size for file in model.glob("*.safetensors") for name, size in safetensors(file).items()}
    return _without_embedding(sizes, "embed_tokens.", r"lm_head\.")


def _without_embedding(sizes: dict[str, int], embedding: str, head: str) -> int:
    """All sizes, without the embedding's where a name matches the pattern `head`."""
    assert sizes, "no weights were found"
    tied = not any(re.search(head, name) for name in sizes)
    return sum(size for name, size in sizes.items() if tied or embedding not in name)


def safetensors(path: Path) -> dict[str, int]:
    """Bytes of each tensor."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: info["data_offsets"][1] - info["data_offsets"][0] for name, info in header.items() if "dtype" in info}


def openvino(path: Path) -> dict[str, int]:
    """Bytes of each constant; of a name that constants share, all together."""
    sizes: dict[str, int] = {}
    for layer in ElementTree.parse(path).iter("layer"):
        data = layer.find("data")
        if layer.get("type") == "Const" and data is not None:
            name = layer.get("name", "")
            sizes[name] = sizes.get(name, 0) + int(data.get("size", 0))
    return sizes


def gguf(path: Path) -> dict[str, int]:
    """Bytes of each tensor: to the next one, alignment included (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    Of all experts of a layer, which are one tensor, as many as a token takes.
    """
    with path.open("rb") as file:
        magic, _, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF", f"{path.name} is no GGUF file"
        settings = {}
        for _ in range(entries):
            key, value = _text(file), _value(file, _number(file, "I"))
            settings[key.rpartition(".")[2]] = value
        alignment = settings.get("alignment", 32)
        starts = {}
        for _ in range(tensors):
            name, dimensions = _text(file), _number(file, "I")
            file.read(8 * dimensions + 4)
            starts[name] = _number(file, "Q")
        begin = -(-file.tell() // alignment) * alignment
    ordered = sorted(starts, key=lambda name: starts[name])
    ends = [starts[name] for name in ordered[1:]] + [os.path.getsize(path) - begin]
    sizes = {name: end - starts[name] for name, end in zip(ordered, ends, strict=True)}
    for name in sizes:
        if "_exps." in name:
            sizes[name] = sizes[name] * settings["expert_used_count"] // settings["expert_count"]
    return sizes


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0]


def _text(file: BinaryIO) -> str:
    return str(file.read(_number(file, "Q")), "utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(file)
    if kind == 9:
        kind, count = _number(file, "I"), _number(file, "Q")
        return [_value(file, kind) for _ in range(count)]
    return _number(
        file, {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind]
    )
