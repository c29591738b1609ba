"""The dtype in which a model computes: its weights', or float32 where the processor only emulates that one.

weights                      where                                       matrix products
float32                      anywhere                                    float32
bfloat16, float16            their products are fast, or on a GPU        their own dtype
bfloat16, float16            they are emulated, readable layers          float32, a piece of a weight at a time
16 bits, int8, int4, …       the native fused steps                      the kernels' own, see docs/in-depth/kernels.md
"""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from hasten.errors import ConfigError, HastenWarning
from hasten.machine import ProductPrecision, emulated
from hasten.model.swap import swap_kinds
from hasten.ops.linear.modules import PackedLinear
from hasten.ops.linear.wide import WideEmbedding, WideLinear

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer

WIDE: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WideLinear, nn.Embedding: WideEmbedding}
NARROW = {wide: narrow for narrow, wide in WIDE.items()}


def check_trainable(model: "Transformer") -> None:
    """Raise ConfigError for a fused model; warn of weights that were rounded to generate with."""
    if not model.readable:
        raise ConfigError(
            "this model is fused, as what generates makes it; to train it, call hasten.unfuse(model) first, and make "
            "the optimizer after that"
        )
    if model.stored_dtype == torch.float32 != model.dtype and not model.dtype_asked:
        own = str(model.dtype).removeprefix("torch.")
        text = f"this float32 checkpoint was loaded in {own}, to generate; load it with dtype='float32' to train it"
        warnings.warn(text, HastenWarning, stacklevel=3)


def choose_width(model: "Transformer") -> None:
    """Make readable layers compute in float32 if products in the weights' dtype are emulated, else in that dtype.

    The replaced modules keep their parameters; a fused model is not changed.
    """
    if not model.readable:
        return
    if model.device.type == "cpu" and emulated(model.dtype, model.device) is not None:
        _swap(model, WIDE, torch.float32)
    elif isinstance(model.embedding, WideEmbedding) or model.compute_dtype != model.dtype:
        narrow(model)


def narrow(model: "Transformer") -> None:
    """Compute in the weights' dtype again."""
    _swap(model, NARROW, model.dtype)


def precision_of(model: "Transformer") -> ProductPrecision:
    """The dtype of a model's matrix products as it is bound now, and the reason."""
    own = str(model.dtype).removeprefix("torch.")
    if not model.readable:
        return ProductPrecision(own, "the native fused steps take its weights as they are")
    if model.compute_dtype != model.dtype:
        reason = emulated(model.dtype, model.device) or f"{own} is emulated where it was bound"
        return ProductPrecision("float32", f"{reason}; the weights stay in {own}")
    return ProductPrecision(own, "the dtype of its weights")


def product_dtype(model: "Transformer") -> str:
    """The dtype of most of a model's products, whose measured rate their speed is compared with."""
    floats = ("bfloat16", "float16", "float8_e4m3fn")
    weights = {"rounded": 0, "other": 0}
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            rounds = layer.format.element not in floats and layer.kernel == "native"
            weights["rounded" if rounds else "other"] += layer.in_features * layer.out_features
    if weights["rounded"] > weights["other"]:
        return "int8"  # the native kernel rounds activations, and multiplies int8 by int8 or int4
    own = str(model.compute_dtype).removeprefix("torch.")
    return own if emulated(own, model.device) is None else "float32"  # native kernels compute in float32 there, too


def _swap(model: "Transformer", kinds: dict[type[nn.Module], type[nn.Module]], dtype: torch.dtype) -> None:
    swap_kinds(model, kinds)
    for module in model.modules():
        if isinstance(module, PackedLinear) and module.request.dtype != dtype:
            module.to(dtype)  # it holds the same numbers, and picks its kernel for such activations
