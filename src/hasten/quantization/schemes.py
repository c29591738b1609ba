"""Quantization schemes: `Int8`, `Int4`, `Int3`, `Int2` and `Mixed` give the format of each layer of a model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from hasten.errors import ConfigError
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear.weights import INT4_GROUP, INT8, WeightFormat, int4_format
from hasten.quantization.rounding import GROUP_SIZES, Search

CHOICES: dict[str, tuple[object, ...]] = {
    "group_size": GROUP_SIZES,
    "symmetric": (True, False),
    "lm_head": ("same", "int8", "none"),
    "embedding": ("same", "int8", "none"),
    "search": ("minmax", "mse"),
    "scale_dtype": ("auto", "float16", "bfloat16"),
    "activations": ("auto", "int8", "float"),
}
AskedActivations = Literal["auto", "int8", "float"]


def tied_head_group(width: int) -> int:
    """The group size of an int8 lm_head that is also the embedding, for rows of `width` numbers."""
    return next((size for size in (128, 64, 32) if width % size == 0), 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """8-bit integers with one float32 scale for each output row, or for each group in an lm_head tied to the embedding.

    activations: "int8" also rounds each token's activations to int8 for the product (faster with more than a few rows),
    "float" keeps them in 16 bits. "auto" is "int8" for weights in groups, whose activations have a scale for each group
    too, and "float" for weights with one scale a row: with one scale for a whole row of activations, published models
    lose several percent of perplexity.
    lm_head: "int8" and "same" quantize it too, "none" leaves it.
    embedding: likewise. If it is tied to the lm_head they stay one matrix, stored as `lm_head` says: "int8" in groups
    of 128 (or what divides the width), because rows of embeddings have outliers and one scale for a row errs twice as
    much; by row with "same", or if activations are "int8".
    """

    bits: ClassVar[int] = 8
    search: ClassVar[Search] = "minmax"
    activations: AskedActivations = "auto"
    lm_head: Literal["int8", "same", "none"] = "int8"
    embedding: Literal["same", "int8", "none"] = "none"

    def __post_init__(self) -> None:
        _check(self)

    def layers(self, model: Transformer) -> dict[str, LayerFormat]:
        """The format of each layer by name."""
        found = _by_kind(self, model, INT8)
        if model.tied and self.lm_head == "int8" and self.activations != "int8":
            scales = weight_formats(model, "auto")[f"int4-g{tied_head_group(model.config.hidden_size)}"].scales
            found["head"] = LayerFormat(replace(INT8, scales=scales), "float")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4:
    """4-bit integers with a scale (and, if asymmetric, a zero) for each group of input features of a row.

    group_size: 32, 64 or 128; 0: a row. Smaller groups are more exact and take more bytes.
    search: "mse" searches each group's scale with the least squared error, "minmax" takes the group's range.
    scale_dtype: "auto" is the model's own if it is float16 or bfloat16, else float16.
    lm_head: "int8" (errors in this layer matter most), "same" or "none". embedding, activations: as in `Int8`.
    """

    bits: ClassVar[int] = 4
    group_size: int = INT4_GROUP
    symmetric: bool = True
    lm_head: Literal["same", "int8", "none"] = "int8"
    embedding: Literal["same", "int8", "none"] = "none"
    search: Search = "mse"
    scale_dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    activations: AskedActivations = "auto"

    def __post_init__(self) -> None:
        _check(self)

    def layers(self, model: Transformer) -> dict[str, LayerFormat]:
        """The format of each layer by name."""
        weight = weight_formats(model, self.scale_dtype)[f"int{self.bits}-g{self.group_size}"]
        return _by_kind(self, model, weight if self.symmetric else replace(weight, zero="point"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Int3(Int4):
    """3-bit integers; the settings are those of `Int4`. A model runs with them as int4: only the folder is smaller."""

    bits: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Int2(Int4):
    """2-bit integers; otherwise as `Int3`."""

    bits: ClassVar[int] = 2


GROUPED_FORMATS = {f"int{bits}-g{size}": (bits, size) for bits in (4, 3, 2) for size in GROUP_SIZES}
FORMATS = ("int8", *GROUPED_FORMATS)  # as a table names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A format for each layer, from a table: int4 and less are symmetric, the rest is as in `Int4`.

    table: maps layer names ("blocks.0.attention.q", …, "head", "embedding") to "int8", "int4-g128" (groups of 128) or
    any other of `FORMATS`. Head and embedding are left as they are if missing; an embedding tied to the head has the
    head's name.
    """

    table: Mapping[str, str]
    search: Search = "mse"
    scale_dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    activations: AskedActivations = "auto"

    def __post_init__(self) -> None:
        _check(self)
        for name, format in self.table.items():
            if format not in FORMATS:
                raise ConfigError(f"{name}: there is no format {format!r:.40}; known: {', '.join(FORMATS)}")

    def layers(self, model: Transformer) -> dict[str, LayerFormat]:
        """The format of each layer by name. Raises ConfigError for a table of another model."""
        known = layers_to_quantize(model)
        if unknown := [name for name in self.table if name not in known]:
            tied = " (it is one matrix with the head)" if unknown[0] == "embedding" else ""
            raise ConfigError(f"the table of formats names {unknown[0]!r:.80}, which this model does not have{tied}")
        if missing := [name for name in known if name.startswith("blocks.") and name not in self.table]:
            raise ConfigError(f"the table of formats lacks {missing[0]!r} ({len(missing)} layers in all)")
        formats = weight_formats(model, self.scale_dtype)
        return {
            name: _layer(formats[self.table[name]], "none" if name == "embedding" else self.activations)
            for name in known
            if name in self.table
        }


Scheme = Int8 | Int4 | Mixed
SCHEMES: dict[str, type[Int8 | Int4]] = {"int8": Int8, "int4": Int4, "int3": Int3, "int2": Int2}


# Ends of names of layers that are not quantized: small ones, and one that is multiplied head by head.
KEPT_PLAIN = (".router", ".shared_gate", ".beta", ".decay", ".kv_up")


def layers_to_quantize(model: Transformer) -> list[str]:
    """Names of the layers that can be quantized: all linear layers of the blocks, then the head, then the embedding.

    Experts are among them, routers, the gate of a shared MLP, and decay and strength of Gated DeltaNet never (they are
    small, and a token sent to the wrong expert is lost), nor what makes keys and values of latents: its product is
    split by heads, and over a cache transposed. An embedding tied to the head has the head's name.
    """
    linears = [name for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)]
    blocks = [f"blocks.{name}" for name in linears if not name.endswith(KEPT_PLAIN)]
    return [*blocks, "head"] if model.tied else [*blocks, "head", "embedding"]


_SAME_INPUT = r"(attention)\.[qkv]$|(mlp|experts|shared)\.(gate|up)$|(mixer)\.(query|key|value|z|step)$"


def units_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group layers that should have the same format: fused steps compute q, k and v, or gate and up, in one product.
    Files may hold the projections of a layer that keeps a state in one tensor.

    A block's experts have one format for gate and up, and one for down.
    """
    units: dict[str, list[str]] = {}
    for name in names:
        shared = re.sub(r"experts\.\d+\.", "experts.", name)
        unit = re.sub(_SAME_INPUT, r"\1\2\4.inputs", shared)
        units.setdefault(unit, []).append(name)
    return units


def weight_formats(model: Transformer, scale_dtype: str) -> dict[str, WeightFormat]:
    """The weight formats of a model by their names in FORMATS, symmetric. scale_dtype: as in `Int4`."""
    if scale_dtype == "auto":
        scale_dtype = "bfloat16" if model.dtype == torch.bfloat16 else "float16"
    scales = torch.bfloat16 if scale_dtype == "bfloat16" else torch.float16
    grouped = {name: int4_format(size, scale_dtype=scales, bits=bits) for name, (bits, size) in GROUPED_FORMATS.items()}
    return {"int8": INT8} | grouped


def _layer(weight: WeightFormat, activations: AskedActivations | Literal["none"]) -> LayerFormat:
    """The format of a layer; "auto" activations are "int8" if the weight has groups, else "float"."""
    if activations == "auto":
        activations = "int8" if weight.group_size else "float"
    return LayerFormat(weight, activations)


def _by_kind(scheme: "Int8 | Int4", model: Transformer, weight: WeightFormat) -> dict[str, LayerFormat]:
    """The same format for all layers of the blocks; lm_head and embedding by their own settings."""
    layer = _layer(weight, scheme.activations)
    kinds = {"same": layer, "int8": _layer(INT8, scheme.activations)}
    head, embedding = kinds.get(scheme.lm_head), kinds.get(scheme.embedding)
    if model.tied and embedding not in (None, head):
        raise ConfigError(
            f"this model's embedding and lm_head are one matrix, so embedding={scheme.embedding!r} and "
            f"lm_head={scheme.lm_head!r} contradict each other: lm_head decides"
        )
    own = {"head": head, "embedding": embedding and replace(embedding, activations="none")}
    found = {name: own.get(name, layer) for name in layers_to_quantize(model)}
    return {name: format for name, format in found.items() if format is not None}


def _check(scheme: Scheme) -> None:
    for name, known in CHOICES.items():
        value = getattr(scheme, name, known[0])
        if type(value) is not type(known[0]) or value not in known:  # 64.0 and True are equal to valid values
            raise ConfigError(f"{name} must be one of {', '.join(map(str, known))}; found {value!r}")
