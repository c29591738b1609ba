"""Writing a model as a Hugging Face folder that transformers, and hasten, load again."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hasten.errors import CheckpointError
from hasten.machine.files import write_atomically
from hasten.model.families import FAMILIES
from hasten.model.families.family import Piece
from hasten.model.transformer import Transformer

SHARD_BYTES = 4_000_000_000  # large checkpoints are written in files of about this size


def save(model: Transformer, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write config.json, safetensors, tokenizer and generation_config.json.

    The padding of the vocabulary is taken off. Tied weights of which only one was changed are written apart, and the
    config says so. dtype converts on the way. Every file is written under a temporary name and renamed, the config
    last, so that a folder is never half new. Raises CheckpointError where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = _write_weights(model, folder, dtype)
        if model.tokenizer is not None:
            model.tokenizer.save(folder)
        if model.generation:
            write_atomically(folder / "generation_config.json", json.dumps(model.generation, indent=2) + "\n")
        text = json.dumps(exported_config(model, dtype or model.dtype), indent=2, sort_keys=True) + "\n"
        write_atomically(folder / "config.json", text)
        for stale in folder.glob("model*.safetensors"):
            if stale.name not in names:
                stale.unlink()
        if len(names) == 1:
            (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from None


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


def published_tensors(model: Transformer, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, contiguous tensor on the CPU), fused tensors put together again."""
    parts: dict[str, list[tuple[Piece, str]]] = {}
    skip_head = is_tied(model)
    for ours, piece in FAMILIES[model.config.family].places(model.config):
        if not (ours == "head.weight" and skip_head):
            parts.setdefault(piece.name, []).append((piece, ours))
    for name, pieces in parts.items():
        tensors = [_unpadded(model, ours) for _, ours in pieces]
        first = pieces[0][0]
        if first.interleaved is not None:
            size = first.interleaved[2]
            tensor = torch.stack([t.unflatten(0, (-1, size)) for t in tensors], dim=1).flatten(0, 2)
        elif first.start is not None:
            order = sorted(range(len(pieces)), key=lambda i: pieces[i][0].start or 0)
            tensor = torch.cat([tensors[i] for i in order])
        else:
            tensor = tensors[0]
        if first.transposed:
            tensor = tensor.t()
        yield name, tensor.to(device="cpu", dtype=dtype).contiguous()


def _unpadded(model: Transformer, ours: str) -> Tensor:
    tensor = model.get_parameter(ours).detach()
    return tensor[: model.config.vocab_size] if ours in ("embedding.weight", "head.weight") else tensor


def _write_weights(model: Transformer, folder: Path, dtype: torch.dtype | None) -> list[str]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in published_tensors(model, dtype):
        if filled and filled + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, shard in zip(names, shards, strict=True):
        temporary = folder / f".{file}.{os.getpid()}"
        try:
            save_file(shard, temporary, metadata={"format": "pt"})
            os.replace(temporary, folder / file)
        except Exception as error:  # safetensors reports a full disk as its own error
            raise CheckpointError(f"{folder / file} cannot be written: {error}") from None
        finally:
            temporary.unlink(missing_ok=True)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
            "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
        }
        write_atomically(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return names
