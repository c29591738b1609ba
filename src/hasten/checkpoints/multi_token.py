"""The multi-token head of a checkpoint: read when a model is to draft with it, and copied when the model is written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.checkpoints.checkpoint import DTYPES, StoredTensor, StoredTensors, read_headers
from hasten.checkpoints.fill_quantized import fill_quantized
from hasten.checkpoints.formats.file_format import QuantizedFolder
from hasten.checkpoints.formats.registry import read_quantization
from hasten.checkpoints.hub import resolve_model
from hasten.checkpoints.load import check_pieces, fill_pieces
from hasten.errors import CheckpointError, ConfigError, HastenError, HastenWarning
from hasten.machine.regular_files import read_json
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES
from hasten.model.families.family import layouts
from hasten.model.families.slices import TensorSlice
from hasten.model.families.wrapped import multi_token_tensors, text_modules
from hasten.model.initialize import unfilled
from hasten.model.multi_token import BESIDE_BLOCK, MultiTokenHead, head_config
from hasten.model.transformer import Transformer

_INSTEAD = "take the draft suffix, or a smaller model"


def load_head(model: Transformer) -> MultiTokenHead:
    """The multi-token head in the checkpoint that a model was loaded from, in the model's dtype and on its device.

    Layers that the checkpoint has quantized stay so. Raises ConfigError where there is no head that hasten computes,
    CheckpointError for one that is not whole.
    """
    config = model.config
    if FAMILIES[config.family].multi_token is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.multi_token is not None)
        raise ConfigError(
            f"the draft mtp is for models with a multi-token head ({known}), not {config.family}; {_INSTEAD}"
        )
    if model.origin is None:
        raise ConfigError(
            "the draft mtp reads the multi-token head of the folder that a model is loaded from, and this model was "
            f"made in memory; {_INSTEAD}"
        )
    folder = resolve_model(model.origin)
    if folder.is_file():
        raise ConfigError(
            f"the multi-token head of a GGUF file ({folder}) is not read; load the folder that it was made of"
        )
    tensors = read_headers(folder)
    stored = tensors.renamed(multi_token_tensors(tensors))
    if not stored:
        raise ConfigError(
            f"{model.origin} has no multi-token head: none of its {len(tensors)} tensors is called mtp.…, which "
            "programs that convert a checkpoint often leave out; take the published checkpoint, or the draft suffix"
        )
    pieces, quantized = _located(config, stored, folder)
    with unfilled():
        head = MultiTokenHead(config).eval()
    seen: Mapping[str, StoredTensor] = stored if quantized is None else quantized.logical
    modules: Mapping[str, Any] = {} if quantized is None else quantized.modules
    check_pieces(pieces, seen, head)
    plain = {ours: piece for ours, piece in pieces.items() if piece.name not in modules}
    device = None if model.device.type == "cpu" else model.device
    fill_pieces(head, plain, stored.read, stored, dtype=model.dtype, device=device, mapped=True)
    if quantized is not None:
        others = {ours: piece for ours, piece in pieces.items() if ours not in plain}
        fill_quantized(head, others, quantized, dtype=model.dtype, device=device)
    return head


def stored_head(model: Transformer) -> StoredTensors:
    """The plain tensors of the multi-token head beside the model in its folder, by their names there; empty: none.

    A head that is stored in another way is left out, and so is any where the folder is gone; a HastenWarning says so.
    """
    if FAMILIES[model.config.family].multi_token is None or model.origin is None:
        return StoredTensors()
    try:
        folder = resolve_model(model.origin)
        tensors = read_headers(folder) if folder.is_dir() else StoredTensors()
    except HastenError as error:
        _warn_left_out(f"a multi-token head, if {model.origin} had one, is not written again: {error}")
        return StoredTensors()
    stored = tensors.renamed(multi_token_tensors(tensors))
    pieces = _plain_pieces(model.config, stored)
    if pieces is not None and {piece.name for piece in pieces.values()} == set(stored):
        return stored
    if stored:
        _warn_left_out(
            f"{folder}: its multi-token head is not written again: hasten copies heads of one whole block in plain "
            "tensors only"
        )
    return StoredTensors()


def _warn_left_out(text: str) -> None:
    warnings.warn(text, HastenWarning, stacklevel=5)


def has_head(model: Transformer) -> bool:
    """Whether there is a multi-token head in the checkpoint that a model was loaded from."""
    if FAMILIES[model.config.family].multi_token is None or model.origin is None:
        return False
    try:
        folder = resolve_model(model.origin)
        return folder.is_dir() and bool(multi_token_tensors(read_headers(folder)))
    except HastenError:  # it may be gone by now
        return False


def _located(
    config: ModelConfig, stored: StoredTensors, folder: Path
) -> tuple[dict[str, TensorSlice], QuantizedFolder | None]:
    """The place of every parameter of the head, and what reads those that are quantized."""
    pieces, quantized = _plain_pieces(config, stored), None
    names = set(stored)
    if pieces is None:
        where = folder / "config.json"
        values = read_json(where)
        given = values.get("quantization_config", values.get("compression_config"))
        if given is not None:
            quantized = read_quantization(values, text_modules(values, given), where)(stored)
            names = set(quantized.logical)
            pieces = _pieces(config, quantized.logical)
    if pieces is None:
        raise CheckpointError(
            f"{folder}: the multi-token head is not whole, or stored in a way that hasten does not read ({len(stored)} "
            f"tensors are called mtp.…); download the folder again, or {_INSTEAD}"
        )
    if others := sorted(names - {piece.name for piece in pieces.values()}):
        raise ConfigError(
            f"{folder}: the multi-token head has {others[0]!r:.100}, and hasten drafts with heads of one block that "
            f"share the model's embedding; {_INSTEAD}"
        )
    return pieces, quantized


def _plain_pieces(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, TensorSlice] | None:
    """The places of the head's parameters where all are plain tensors."""
    pieces = _pieces(config, stored)
    if pieces is None or any(stored[piece.name].dtype not in DTYPES for piece in pieces.values()):
        return None
    return pieces


def _pieces(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, TensorSlice] | None:
    """The places of the head's parameters under the first layout whose tensors are all there."""
    family = FAMILIES[config.family]
    assert family.multi_token is not None
    named = replace(family, names={**family.names, **family.multi_token}, in_gguf=None)
    own = {f"{name}.weight": TensorSlice(family.multi_token[name] + ".weight") for name in BESIDE_BLOCK}
    for layout in layouts(named, head_config(config)):
        found = own | {ours: piece for ours, piece in layout if not ours.startswith(("embedding.", "head."))}
        if all(piece.name in stored for piece in found.values()):
            return found
    return None
