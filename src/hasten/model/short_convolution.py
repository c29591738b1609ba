"""LFM2's short convolution in a block's place of attention (arXiv 2511.23404): a token sees the few before it.

B: sequences, T: tokens of each, C: hidden size. What it keeps of a text is the last inputs of the convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hasten.model.mixer import StateMixer
from hasten.model.mixer_config import ConvolutionConfig
from hasten.ops.states import State, causal_convolution

if TYPE_CHECKING:
    from hasten.model.interfaces import StateContext
    from hasten.model.mlp import Linear


class ShortConvolution(StateMixer):
    """y = out(query(x) ⊙ conv(key(x) ⊙ value(x))); the paper's C, B and x are query, key and value."""

    sizes: ConvolutionConfig
    key: Linear
    query: Linear
    value: Linear

    def __init__(self, sizes: ConvolutionConfig, hidden: int, eps: float) -> None:
        """eps: of the model's norms, of which this layer has none."""
        super().__init__(sizes, hidden)

    def forward(self, x: Tensor, layer: StateContext) -> Tensor:
        y = layer.recur(self.mix, self.key(x) * self.value(x))  # (B, T, C) float32
        return self.out(self.query(x) * y.to(x.dtype))

    def mix(self, state: State | None, mixed: Tensor) -> tuple[Tensor, State]:
        """Outputs (n, L, C) of n sequences' next L tokens, and the state after them; see `StateContext`."""
        before = None if state is None else state["inputs"]
        y, inputs = causal_convolution(mixed, self.conv.weight[:, 0], before, self.conv.bias)
        return y, {"inputs": inputs}
