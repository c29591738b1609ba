"""Models with random weights, made on the device in their format, and the decoder that serves them fastest."""

from typing import Any

import torch
from torch import nn

from gpu.worker import DEVICE, TINY
from hasten.ops.linear import INT8, PackedLinear, int4_format

BITS = {"bfloat16": 16, "int8": 8, "int4": 4}


def random_model(shape: str, *, format: str = "bfloat16", group: int = 0) -> Any:
    """A model of `hasten.planning.shapes` ("tiny" in a dry run); one of 70 B never exists in 16 bits.

    format: bfloat16, int8 (a scale a row) or int4 (scales of `group`), of every linear layer.
    """
    from hasten.model.families import read_config
    from hasten.model.transformer import Transformer
    from hasten.planning.shapes import SHAPES

    with torch.device("meta"):
        model = Transformer(read_config(SHAPES[shape if not TINY else "tiny"])).to(torch.bfloat16)
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if format != "bfloat16" and isinstance(child, nn.Linear):
                setattr(owner, name, _random_packed(child, format, group))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fresh = torch.empty(parameter.shape, dtype=torch.bfloat16, device=DEVICE)
            fresh.normal_(0, parameter.shape[-1] ** -0.5) if fresh.dim() > 1 else fresh.fill_(1)
            setattr(module, name, nn.Parameter(fresh, requires_grad=False))
    model.ropes.to(DEVICE)
    model.bind()
    return model.eval()


def _random_packed(layer: nn.Linear, format: str, group: int) -> PackedLinear:
    stored = INT8 if format == "int8" else int4_format(group, scale_dtype=torch.float16)
    activations = "float" if format == "int8" else "int8"  # as `hasten.quantize` has them by default
    made = PackedLinear(layer.in_features, layer.out_features, stored, activations=activations, device=DEVICE)
    made.data.random_(-128, 128) if made.data.dtype == torch.int8 else made.data.random_(0, 256)
    made.scales.fill_(0.2 / (16 if format == "int4" else 256) / layer.in_features**0.5)
    return made


def fastest(model: Any) -> Any:
    """The model as a user has it with `--compile`: fused where that fits, else its blocks compiled."""
    from hasten.engine.compiled import compile_blocks
    from hasten.model.fused import fuse_where_it_fits

    if DEVICE == "cpu":  # a dry run measures nothing, and compiling takes its time
        return model
    model = fuse_where_it_fits(model)
    if model.readable:
        compile_blocks(model)
    return model


def by_compiler(model: Any) -> bool:
    """Whether its blocks are compiled, which takes steps of fixed shapes."""
    return DEVICE != "cpu" and model.stack is None


def decoder_of(model: Any, *, batch: int, capacity: int) -> Any:
    """Texts whose decode steps are captured."""
    from hasten.engine.given_texts import GivenTexts

    return GivenTexts(model, batch=batch, capacity=capacity, compiled=by_compiler(model))


def bytes_per_token(shape: str, format: str, group: int, context: int, scale_bytes: int = 2) -> float:
    """Bytes that a token has to read: every weight but the embedding, scales, keys and values of the context."""
    from hasten.model.families import read_config
    from hasten.planning.cost import kv_bytes_per_token
    from hasten.planning.shapes import SHAPES

    s = SHAPES[shape if not TINY else "tiny"]
    width, inner, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    kv = s["num_key_value_heads"] * width // s["num_attention_heads"]
    weights = layers * (2 * width * width + 2 * width * kv + 3 * width * inner) + s["vocab_size"] * width
    per = BITS[format] / 8 + (scale_bytes / group if group else 0 if format == "bfloat16" else 4 / width)
    return weights * per + kv_bytes_per_token(read_config(s), 2) * context
