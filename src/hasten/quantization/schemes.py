"""What to quantize and how: `Int8()`, `Int4()`, `Int3()` and `Int2()`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from hasten.errors import ConfigError
from hasten.model.formats.record import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear.weights import INT8, int4_format
from hasten.quantization.rounding import GROUP_SIZES, Search

CHOICES: dict[str, tuple[object, ...]] = {
    "group_size": GROUP_SIZES,
    "symmetric": (True, False),
    "lm_head": ("same", "int8", "none"),
    "search": ("minmax", "mse"),
    "scale_dtype": ("auto", "float16", "bfloat16"),
    "activations": ("int8", "float"),
}
KERNEL_BITS = (4, 8)  # of weights that kernels multiply; others run as plain ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """8-bit integers with one float32 scale for each output row.

    activations: "int8" also rounds each token's activations to int8 for the product (faster where more than a few rows
    are computed at once), "float" keeps them. lm_head: "same" or "int8" quantizes it too, "none" leaves it.
    """

    bits: ClassVar[int] = 8
    search: ClassVar[Search] = "minmax"
    activations: Literal["int8", "float"] = "int8"
    lm_head: Literal["same", "int8", "none"] = "same"

    def __post_init__(self) -> None:
        _check(self)

    def formats(self, dtype: torch.dtype) -> tuple[LayerFormat, LayerFormat | None]:
        """How the blocks' layers and the lm_head of a model in `dtype` are stored; None: not quantized."""
        layer = LayerFormat(INT8, self.activations)
        return layer, None if self.lm_head == "none" else layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4:
    """4-bit integers with a scale (and, asymmetric, a zero) for each group of input features of a row.

    group_size: 32, 64 or 128. search: "mse" searches each group's scale with the least squared error, "minmax" takes
    the group's range. scale_dtype: "auto" is the model's own where it is float16 or bfloat16, else float16. lm_head:
    "int8" (it is the layer whose error shows most), "same" or "none". activations: as in `Int8`.
    """

    bits: ClassVar[int] = 4
    group_size: int = 128
    symmetric: bool = True
    lm_head: Literal["same", "int8", "none"] = "int8"
    search: Search = "mse"
    scale_dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    activations: Literal["int8", "float"] = "int8"

    def __post_init__(self) -> None:
        _check(self)

    def formats(self, dtype: torch.dtype) -> tuple[LayerFormat, LayerFormat | None]:
        """How the blocks' layers and the lm_head of a model in `dtype` are stored; None: not quantized."""
        name = self.scale_dtype
        if name == "auto":
            name = "bfloat16" if dtype == torch.bfloat16 else "float16"
        scale_dtype = torch.bfloat16 if name == "bfloat16" else torch.float16
        weight = int4_format(self.group_size, symmetric=self.symmetric, scale_dtype=scale_dtype, bits=self.bits)
        layer, int8 = LayerFormat(weight, self.activations), LayerFormat(INT8, self.activations)
        return layer, {"same": layer, "int8": int8, "none": None}[self.lm_head]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int3(Int4):
    """3-bit integers; the settings are those of `Int4`. No kernel multiplies them: a model runs with plain weights."""

    bits: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Int2(Int4):
    """2-bit integers; as `Int3`."""

    bits: ClassVar[int] = 2


Scheme = Int8 | Int4
SCHEMES: dict[str, type[Scheme]] = {"int8": Int8, "int4": Int4, "int3": Int3, "int2": Int2}


def layer_formats(model: Transformer, scheme: Scheme) -> dict[str, LayerFormat]:
    """The layers that the scheme quantizes, by name, in the order of the model.

    All linear layers of the blocks, those of experts too; never a router (it is small, and a token sent to the wrong
    expert is lost) nor an embedding. The lm_head by its own setting.
    """
    layer, head = scheme.formats(model.dtype)
    found = {f"blocks.{name}": layer for name, _ in _linears(model.blocks)}
    return found if head is None else found | {"head": head}


def rounds_activations(layer: LayerFormat) -> bool:
    """Whether the products that serve a layer round activations to int8: plain weights are never multiplied so."""
    return layer.activations == "int8" and layer.weight.bits in KERNEL_BITS


def _linears(blocks: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(".router"):
            yield name, module


def _check(scheme: Scheme) -> None:
    for name, known in CHOICES.items():
        value = getattr(scheme, name, known[0])
        if type(value) is not type(known[0]) or value not in known:  # 64.0 and True equal numbers that they are not
            raise ConfigError(f"{name} must be one of {', '.join(map(str, known))}; found {value!r}")
