"""Attention and MLP for training on a CPU, in fewer passes over memory, with the same parameters under the same names.

They read the weights of plain linear layers directly. If another module replaces a layer (LoRA, a quantized layer),
they call it, as the modules that they replace do.
"""

from typing import Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.attention import Attention
from hasten.model.mlp import MLP
from hasten.model.swap import take_over
from hasten.ops.activation import Functions


class JoinedAttention(Attention):
    """Attention with one wider product for queries, keys and values, which reads x once, forward and backward."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, C) to queries, keys and values, (B, T, heads·D) each."""
        layers = [layer for layer in (self.q, self.k, self.v) if _is_plain(layer)]
        if len(layers) < 3:
            return super().project(x)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        # Joined in every step, because they stay separate parameters.
        weights: list[Tensor] = [layer.weight for layer in layers]
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
        q, k, v = F.linear(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)
        return q, k, v


class FusedMLP(MLP):
    """MLP with bias and GELU, or SiLU and gate, in one pass over memory, forward and backward."""

    functions: Functions

    @classmethod
    def of(cls, mlp: MLP, functions: Functions) -> Self | None:
        """Create the replacement of `mlp`, with its layers; None if it has another activation, or limits."""
        limited = mlp.limit is not None or mlp.up_offset
        if limited or (mlp.activation_name, mlp.gate is None) not in (("gelu_tanh", True), ("silu", False)):
            return None
        new = take_over(cls, mlp)
        new.functions = functions
        return new

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        if self.gate is not None:
            return self.down(self.functions.silu_mul(self.gate(x), self.up(x)))
        up = self.up
        if not _is_plain(up):
            return super().forward(x)
        return self.down(self.functions.bias_gelu(F.linear(x, up.weight), up.bias))


def _is_plain(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a layer multiplies with its weight and does nothing else, such as calling hooks. None: there is none."""
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks)
