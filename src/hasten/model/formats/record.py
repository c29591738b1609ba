"""Which layers of a model are quantized, and how: what a checkpoint says, and what a saved one will say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Activations = Literal["int8", "float"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """How one linear layer is stored and multiplied.

    bits: 8 (group_size 0: one float32 scale a row, symmetric) or 4 (a scale for each group_size input features).
    activations: "int8" rounds each input row to int8 before the product, "float" does not.
    """

    bits: Literal[4, 8]
    group_size: int = 0
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32
    activations: Activations = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The quantized layers of a model by the names of our modules, such as "blocks.0.attention.q" or "head"."""

    layers: Mapping[str, LayerFormat] = field(default_factory=dict)
