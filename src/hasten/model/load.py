"""`hasten.load`: a decoder from a Hugging Face folder, a hub id, or a transformers model already in memory."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import CheckpointError, ConfigError, HastenWarning, ResourceError
from hasten.machine.device import resolve_device, resolve_dtype
from hasten.model.checkpoint import DTYPES, MappedTensors, StoredTensor, check_finite, read_headers, read_json
from hasten.model.config import ModelConfig
from hasten.model.families import family_of, read_config
from hasten.model.families.family import Family, Piece
from hasten.model.tokenizer import Tokenizer
from hasten.model.transformer import Transformer

# Buffers that older versions of transformers saved beside the weights.
_LEFTOVERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight")


def load(source: str | Path | nn.Module, *, dtype: str | torch.dtype | None = None, device: str = "cpu") -> Transformer:
    """Load a language model, ready for inference.

    source: a folder with config.json and safetensors, a hub id such as "owner/name" (downloaded with
    huggingface_hub), or a transformers model, whose weights are taken over without a copy. dtype: "float32",
    "bfloat16", "float16", or None for the checkpoint's own. device: "auto", "cpu", "cuda", "cuda:0", ….

    A folder's weights are memory-mapped: in their own dtype on the CPU they cost no second copy. The model carries
    the folder's tokenizer, or None where it has none: then prompts are token ids.

    Raises CheckpointError for a folder that is damaged, of an unknown family, or not what its config.json says;
    ResourceError if the device or the hub cannot be reached.
    """
    place = resolve_device(device)
    wanted = resolve_dtype(dtype) if dtype is not None else None
    if isinstance(source, nn.Module):
        return _from_transformers(source, wanted, place)
    folder = resolve_folder(source)
    values = read_json(folder / "config.json")
    family, config = family_of(values), read_config(values)
    stored = read_headers(folder)
    pieces = _locate(config, family, [family.places(config)], stored, str(folder))
    _warn_of_unused(stored, pieces, folder)
    model = _skeleton(config)
    _check(pieces, stored, model)
    own = wanted or _own_dtype(values, [stored[piece.name] for piece in pieces.values()])
    _fill(model, pieces, MappedTensors(stored), own, place, str(folder))
    model.tokenizer = Tokenizer.from_folder(folder)
    generation = folder / "generation_config.json"
    model.generation = read_json(generation) if generation.exists() else {}
    return model


def resolve_folder(source: str | Path) -> Path:
    """The local folder of a model: the path itself, or the hub's snapshot of an id "owner/name"."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    name = str(source)
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{name} is not a folder, and not a hub id of the form owner/name")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*"]
            )
        )
    except Exception as error:  # the hub's client raises many kinds, all of which mean that it cannot be had
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ResourceError(f"{name} is not a folder here, and downloading it from the hub failed: {first}") from None


def _from_transformers(module: nn.Module, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    if to_dict is None:
        raise ConfigError(
            f"hasten.load takes a folder, a hub id or a transformers model; found {type(module).__name__}"
        )
    values = to_dict()
    family, config = family_of(values), read_config(values)
    tensors = module.state_dict()
    where = type(module).__name__
    layouts = [layout(config) for layout in (family.in_memory, family.places) if layout is not None]
    pieces = _locate(config, family, layouts, tensors, where)
    model = _skeleton(config)
    _check(pieces, {name: _describe(name, tensor, where) for name, tensor in tensors.items()}, model)
    _fill(model, pieces, tensors, dtype, device if str(device) != "cpu" else None, where)
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        model.generation = generation.to_dict()
    return model


def _describe(name: str, tensor: Tensor, where: str) -> StoredTensor:
    kind = next((key for key, value in DTYPES.items() if value == tensor.dtype), str(tensor.dtype))
    return StoredTensor(name, kind, tuple(tensor.shape), Path(where))


def _skeleton(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    for table in model.ropes:
        table.reset()
    return model.eval()


def _locate(
    config: ModelConfig, family: Family, layouts: list, tensors: Mapping[str, Any], where: str
) -> dict[str, Piece]:
    """Find every parameter's piece under one of the layouts, or say which tensor is missing."""
    missing = ""
    for layout in layouts:
        pieces: dict[str, Piece] = {}
        for ours, piece in layout:
            name = piece.name
            if name not in tensors:
                name = name.removeprefix(family.base)  # a checkpoint of the bare model, as GPT-2's on the hub
            if name not in tensors:
                if ours == "head.weight" and config.tie_embeddings:
                    continue
                missing = piece.name
                break
            pieces[ours] = piece if name == piece.name else replace(piece, name=name)
        else:
            return pieces
    raise CheckpointError(
        f"{where}: the tensor {missing!r} is missing, which a {family.model_type} of {len(config.layers)} layers needs"
    )


def _warn_of_unused(stored: Mapping[str, StoredTensor], pieces: Mapping[str, Piece], folder: Path) -> None:
    used = {piece.name for piece in pieces.values()}
    unused = [name for name in stored if name not in used and not name.endswith(_LEFTOVERS)]
    if unused:
        warnings.warn(
            f"{folder}: {len(unused)} tensors are not part of this model type and stay unread, "
            f"for example {unused[0]!r:.100}: the results may differ from the model they were trained with",
            HastenWarning,
            stacklevel=3,
        )


def take(tensor: Tensor, piece: Piece) -> Tensor:
    """The part of a stored tensor that a piece names: a view, except for interleaved rows."""
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    if piece.transposed:
        tensor = tensor.t()
    if piece.start is not None:
        tensor = tensor[piece.start : piece.stop]
    if piece.interleaved is not None:
        count, part, size = piece.interleaved
        tensor = tensor.unflatten(0, (-1, count, size))[:, part].flatten(0, 1)  # (H, n, D, …) -> (H·D, …)
    return tensor


def _shape_after(shape: tuple[int, ...], piece: Piece) -> tuple[int, ...] | None:
    """The shape that `take` would give, or None if the piece does not fit."""
    if piece.expert is not None:
        if len(shape) < 2 or piece.expert >= shape[0]:
            return None
        shape = shape[1:]
    if piece.transposed:
        shape = shape[::-1]
    if not shape:
        return None
    if piece.interleaved is not None:
        count, _, size = piece.interleaved
        return (shape[0] // count, *shape[1:]) if shape[0] % (count * size) == 0 else None
    if piece.start is not None and piece.stop is not None:
        return (piece.stop - piece.start, *shape[1:]) if piece.stop <= shape[0] else None
    return shape


def _check(pieces: Mapping[str, Piece], stored: Mapping[str, StoredTensor], model: Transformer) -> None:
    """Compare every tensor's dtype and shape with what the config asks for, before any is read."""
    used: dict[str, int] = {}  # rows of each fused tensor that a piece takes
    for ours, piece in pieces.items():
        _check_piece(ours, piece, stored[piece.name], model)
        if piece.stop is not None:
            used[piece.name] = max(used.get(piece.name, 0), piece.stop)
    for ours, piece in pieces.items():
        if piece.stop is not None:
            whole = _shape_after(stored[piece.name].shape, replace(piece, start=None, stop=None)) or ()
            if whole[0] != used[piece.name]:
                raise CheckpointError(
                    f"{stored[piece.name].file}: {piece.name} has shape {list(stored[piece.name].shape)}; "
                    f"config.json accounts for {used[piece.name]} output rows"
                )


def _check_piece(ours: str, piece: Piece, stored: StoredTensor, model: Transformer) -> None:
    if stored.dtype not in DTYPES:
        raise CheckpointError(
            f"{stored.file}: {stored.name} is stored as {stored.dtype}; expected one of {', '.join(DTYPES)}"
        )
    expected = tuple(model.get_parameter(ours).shape)
    found = _shape_after(stored.shape, piece)
    if found != expected:
        raise CheckpointError(
            f"{stored.file}: {stored.name} has shape {list(stored.shape)}; config.json asks for {list(expected)}"
            f"{'' if found == stored.shape else f' as a part of it ({ours})'}"
        )


def _own_dtype(values: Mapping[str, Any], stored: Iterable[StoredTensor]) -> torch.dtype:
    """The dtype that most of the checkpoint's bytes are in."""
    counts: dict[str, int] = {}
    for tensor in stored:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.bytes
    return DTYPES[max(counts, key=lambda name: counts[name])]


def _fill(
    model: Transformer,
    pieces: Mapping[str, Piece],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device | None,
    where: str,
) -> None:
    """Put every tensor into the skeleton, converting one at a time where dtype or device differ."""
    for ours, piece in pieces.items():
        tensor = take(tensors[piece.name], piece)
        check_finite(piece.name, tensor, where)
        owner, _, leaf = ours.rpartition(".")
        parameter = nn.Parameter(tensor.to(device=device, dtype=dtype))
        setattr(model.get_submodule(owner), leaf, parameter)
    tie(model)
    if device is not None:
        model.ropes.to(device)
    model.bind()


def tie(model: Transformer) -> None:
    """Make head and embedding one parameter where the config says so and the checkpoint does not contradict it."""
    if not model.config.tie_embeddings:
        return
    head, embedding = model.head.weight, model.embedding.weight
    if head.is_meta or head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding):
        model.head.weight = embedding
