"""Which layers of a model are quantized, and how: what a checkpoint says, and what a saved one will say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hasten.ops.linear.weights import WeightFormat

Activations = Literal["int8", "float"]


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """How one linear layer is stored, and how it is multiplied: activations "int8" rounds each input row to int8 before
    the product, "float" does not.
    """

    weight: WeightFormat
    activations: Activations = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The quantized layers of a model by the names of our modules, such as "blocks.0.attention.q" or "head"."""

    layers: Mapping[str, LayerFormat] = field(default_factory=dict)
