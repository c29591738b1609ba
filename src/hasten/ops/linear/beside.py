"""What a product takes beside x and its weight: the norm before it, the activation and gate after it."""

from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
GATE_ROWS = 32  # rows of gate, then as many of up, in every 64 rows of a gated weight


class NormArguments(NamedTuple):
    """An RMS norm x / rms(x) · (weight + offset), or, centred, a layer norm; weights (K,)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    centred: bool = False
