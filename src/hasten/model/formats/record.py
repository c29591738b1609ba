"""How one layer of a model is quantized: what a checkpoint says, and what a saved one will say."""

from dataclasses import dataclass
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
