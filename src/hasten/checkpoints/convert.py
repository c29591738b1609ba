"""`convert`: a quantized checkpoint in another published layout, its numbers as they are."""

import shlex
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from hasten.checkpoints.advice import asked_as, export_plain, plain_folder
from hasten.checkpoints.export import Quantized, export_model
from hasten.checkpoints.load import fill_plain, open_checkpoint, tie
from hasten.errors import ConfigError
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear import QuantizedWeight


@torch.no_grad()
def convert(source: str | Path, output: str | Path, *, format: str = "compressed-tensors") -> Transformer:
    """Write a quantized checkpoint in the layout `format` ("compressed-tensors" or "gptq"), every number as it is.

    source: a folder or a hub id. Integers, scales, zero points and the order of columns are taken over,
    also those that no kernel of ours multiplies; other tensors keep their dtype. One module at a time is in memory.
    Returns the model without its quantized weights (they stay on the meta device).

    Raises ConfigError, and writes nothing, where the checkpoint is not quantized or the other layout would not hold it
    exactly; CheckpointError as `hasten.load` and `export_model` do.
    """
    checkpoint = open_checkpoint(source)
    model, _, pieces, folder = fill_plain(checkpoint, keep_dtypes=True)
    model.origin, model.tokenizer = str(source), checkpoint.tokenizer
    if folder is None:
        raise ConfigError(
            f"{source} is not quantized: `hasten quantize --format {format}` quantizes it, `hasten export` writes it "
            "as it is"
        )
    if checkpoint.path.is_file():
        raise ConfigError(
            f"{asked_as(source)} is a GGUF file, whose types no folder holds: {export_plain(source)} writes its plain "
            f"weights, and hasten quantize {plain_folder(source)} --scheme int4 --format {format} --output "
            f"{shlex.quote(str(output))} quantizes these"
        )
    if "head.weight" not in pieces:
        tie(model)
    elif model.config.tie_embeddings:  # the checkpoint says otherwise
        model.config = replace(model.config, tie_embeddings=False)
    layers = {}
    for ours, piece in pieces.items():
        module, name = folder.modules[piece.name], ours.removesuffix(".weight")
        if not isinstance(model.get_submodule(name), torch.nn.Linear):
            raise ConfigError(f"{module.name} is quantized and no linear layer, which hasten does not convert")
        layers[name] = LayerFormat(module.stored, "float" if module.layer is None else module.layer.activations)
    whole = lru_cache(1)(folder.weight)  # several layers may share one (Phi-3)

    def weight(name: str) -> QuantizedWeight:
        piece = pieces[f"{name}.weight"]
        return whole(folder.modules[piece.name]).map(piece.of)

    export_model(model, Path(output), quantized=Quantized(layers, weight), format=format)
    return model
