"""Writing a model as a Hugging Face folder that transformers, and hasten, load again."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hasten.errors import CheckpointError, ConfigError
from hasten.model.checkpoint import DTYPES
from hasten.model.families import FAMILIES
from hasten.model.families.family import Piece
from hasten.model.transformer import Transformer

SHARD_BYTES = 4_000_000_000  # large checkpoints are written in files of about this size


def save(model: Transformer, folder: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, safetensors, tokenizer and generation_config.json.

    The padding of the vocabulary is taken off. Tied weights of which only one was changed are written apart, and the
    config says so. dtype converts on the way. Weights past `shard_bytes` are split into files of at most so many bytes
    (a single larger tensor has a file of its own), of which one at a time is prepared in memory.

    Everything is first written into a temporary folder inside `folder` and then moved into place, so that a disk that
    fills up leaves the old files as they were. Saving over the folder that the model is mapped from is fine. Raises
    CheckpointError where it cannot be written, ConfigError for a dtype that cannot be.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(f"dtype {dtype} cannot be written; use one of {', '.join(map(str, DTYPES.values()))}")
    staging: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
        weights = _write_weights(model, staging, dtype, shard_bytes)
        if model.tokenizer is not None:
            model.tokenizer.save(staging)
        if model.generation:
            _write_json(staging / "generation_config.json", model.generation)
        _write_json(staging / "config.json", exported_config(model, dtype or model.dtype))
        _move(staging, folder, weights)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{folder} cannot be written: {reason}; choose a folder with room and write access"
        ) from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def exported_config(model: Transformer, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model: the one it came from, with what has changed since."""
    family = FAMILIES[model.config.family]
    values = dict(model.config.source) | {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": model.config.vocab_size,
        "tie_word_embeddings": is_tied(model),
        "dtype": str(dtype).removeprefix("torch."),
    }
    for gone in ("torch_dtype", "_name_or_path", "_attn_implementation_autoset"):
        values.pop(gone, None)
    return values


def is_tied(model: Transformer) -> bool:
    """Whether head and embedding still are one matrix, or two with the same values in a model that ties them."""
    head, embedding = model.head.weight, model.embedding.weight
    return head is embedding or (model.config.tie_embeddings and torch.equal(head, embedding))


@dataclass(frozen=True, slots=True)
class _Published:
    """One tensor of the checkpoint to be: its name, and which of our parameters it is made of."""

    name: str
    parts: tuple[tuple[Piece, str], ...]
    bytes: int


def published_tensors(model: Transformer, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, contiguous tensor on the CPU), fused tensors put together again, one at a time."""
    for planned in _plan(model, dtype):
        yield planned.name, _make(model, planned, dtype)


def _plan(model: Transformer, dtype: torch.dtype | None) -> list[_Published]:
    parts: dict[str, list[tuple[Piece, str]]] = {}
    skip_head = is_tied(model)
    for ours, piece in FAMILIES[model.config.family].places(model.config):
        if not (ours == "head.weight" and skip_head):
            parts.setdefault(piece.name, []).append((piece, ours))
    planned = []
    for name, pieces in parts.items():
        tensors = [_unpadded(model, ours) for _, ours in pieces]
        size = sum(math.prod(t.shape) * (dtype or t.dtype).itemsize for t in tensors)
        planned.append(_Published(name, tuple(pieces), size))
    return planned


def _make(model: Transformer, planned: _Published, dtype: torch.dtype | None) -> Tensor:
    tensors = [_unpadded(model, ours) for _, ours in planned.parts]
    first = planned.parts[0][0]
    if first.interleaved is not None:
        size = first.interleaved[2]
        tensor = torch.stack([t.unflatten(0, (-1, size)) for t in tensors], dim=1).flatten(0, 2)
    elif first.start is not None:
        order = sorted(range(len(tensors)), key=lambda i: planned.parts[i][0].start or 0)
        tensor = torch.cat([tensors[i] for i in order])
    else:
        tensor = tensors[0]
    if first.transposed:
        tensor = tensor.t()
    return tensor.to(device="cpu", dtype=dtype).contiguous()


def _unpadded(model: Transformer, ours: str) -> Tensor:
    tensor = model.get_parameter(ours).detach()
    return tensor[: model.config.vocab_size] if ours in ("embedding.weight", "head.weight") else tensor


def _shards(planned: Sequence[_Published], shard_bytes: int) -> list[list[_Published]]:
    shards: list[list[_Published]] = [[]]
    filled = 0
    for tensor in planned:
        if filled and filled + tensor.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    return shards


def _write_weights(model: Transformer, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> set[str]:
    """Write the weights and return the names of their files."""
    shards = _shards(_plan(model, dtype), shard_bytes)
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, shard in zip(names, shards, strict=True):
        tensors = {planned.name: _make(model, planned, dtype) for planned in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        with (folder / file).open("rb") as written:
            os.fsync(written.fileno())
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for shard in shards for tensor in shard)},
            "weight_map": {tensor.name: file for file, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        _write_json(folder / "model.safetensors.index.json", index)
        names.append("model.safetensors.index.json")
    return set(names)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _move(staging: Path, folder: Path, weights: set[str]) -> None:
    """Rename every file into place, the config last, then remove weights that the new ones replace."""
    files = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    for name in sorted(files, key=lambda name: (str(name) == "config.json", str(name) not in weights, name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, folder / name)
    for stale in [*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"]:
        if stale.name not in weights:
            stale.unlink(missing_ok=True)
