"""A norm as the operator takes it."""

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """A norm over the last dimension: (x - mean)/std · weight + bias if centred, else x/rms · (weight + offset)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    centred: bool = True
