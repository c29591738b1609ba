"""The weights of a layer's experts, as kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass

from hasten.ops.linear.layouts import Operands


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts, in order: gate and up (I, C), down (C, I); and their activation.

    Packed ones lie in the "chunks" layout (ops/linear/layouts.py). All of one kind have one format.
    """

    gate: Sequence[Operands]
    up: Sequence[Operands]
    down: Sequence[Operands]
    activation: str
