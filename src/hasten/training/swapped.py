"""What takes the place of attention and MLP while a model trains on a CPU: the same parameters under the same names, in
fewer passes over memory.

They read the weights of plain linear layers. Where another module replaces a layer (LoRA, a quantized layer),
they call it, as the module does whose place they take.
"""

from typing import Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.swap import take_over
from hasten.model.transformer import MLP, Attention
from hasten.ops.activation import Functions


class JoinedAttention(Attention):
    """Queries, keys and values as one product, forward and backward: x is read once, by a wider product."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (B, T, C), the heads still side by side."""
        layers = [layer for layer in (self.q, self.k, self.v) if _is_plain(layer)]
        if len(layers) < 3:
            return super().project(x)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        # Joined in every step: they stay parameters of their own.
        weights: list[Tensor] = [layer.weight for layer in layers]
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
        q, k, v = F.linear(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)
        return q, k, v


class FusedMLP(MLP):
    """Bias and GELU, or SiLU and gate, in one pass over memory, forward and backward."""

    functions: Functions

    @classmethod
    def of(cls, mlp: MLP, functions: Functions) -> Self | None:
        """In the place of `mlp`, whose layers it takes over; None where there is no such pair."""
        if (mlp.activation_name, mlp.gate is None) not in (("gelu_tanh", True), ("silu", False)):
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


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling a layer is multiplying with its weight, and nothing else."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not any(hooks)
