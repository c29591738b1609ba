"""Gated DeltaNet in a block's place of attention (arXiv 2412.06464): what it keeps of a text has the same size always.

B: sequences, T: tokens of each, C: hidden size, Hk: heads of queries and keys of size Dk, H: heads of values of size
Dv, K: tokens of the convolution; its channels are those of all queries, keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.mixer import StateMixer
from hasten.model.mixer_config import DeltaConfig
from hasten.model.norms import RMSNorm
from hasten.ops.delta import delta_rule
from hasten.ops.states import State, causal_convolution

if TYPE_CHECKING:
    from hasten.model.interfaces import StateContext
    from hasten.model.mlp import Linear

_EPS = 1e-6  # added to the squared length of a query or key


class GatedDeltaNet(StateMixer):
    """Short convolution, delta rule with decay, a norm of each head's output, an output gate."""

    sizes: DeltaConfig
    query: Linear
    key: Linear
    value: Linear
    z: Linear  # of the output gate
    beta: Linear
    decay: Linear

    def __init__(self, sizes: DeltaConfig, hidden: int, eps: float) -> None:
        super().__init__(sizes, hidden)
        self.log_rate = nn.Parameter(torch.empty(sizes.value_heads))
        self.rate_bias = nn.Parameter(torch.empty(sizes.value_heads))
        self.value_norm = RMSNorm(sizes.value_dim, eps, 0.0)

    def forward(self, x: Tensor, layer: StateContext) -> Tensor:
        mixed = torch.cat((self.query(x), self.key(x), self.value(x)), dim=-1)  # (B, T, channels)
        rate = self.log_rate.float().exp() * F.softplus(self.decay(x).float() + self.rate_bias.float())  # (B, T, H)
        y = layer.recur(self.mix, mixed, -rate, self.beta(x).float().sigmoid())  # (B, T, H, Dv) float32
        gate = F.silu(self.z(x).float()).unflatten(-1, (self.sizes.value_heads, -1))
        return self.out((self.value_norm(y) * gate).flatten(-2).to(x.dtype))

    def mix(self, state: State | None, mixed: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, State]:
        """Outputs (n, L, H, Dv) of n sequences' next L tokens, and the state after them; see `StateContext`."""
        sizes = self.sizes
        before = None if state is None else state["inputs"]
        mixed, inputs = causal_convolution(mixed, self.conv.weight[:, 0], before)
        q, k, v = F.silu(mixed).split((sizes.keys, sizes.keys, sizes.values), dim=-1)
        q, k = (_unit(x.unflatten(-1, (sizes.key_heads, -1))) for x in (q, k))
        v = v.unflatten(-1, (sizes.value_heads, -1))
        matrix = None if state is None else state["matrix"]
        y, matrix = delta_rule(q * sizes.key_dim**-0.5, k, v, decay, beta, matrix)
        return y, {"inputs": inputs, "matrix": matrix}

    @staticmethod
    def fill(leaf: str, values: Tensor, generator: torch.Generator) -> None:
        if leaf == "rate_bias":
            values.fill_(1.0)
        else:
            values.uniform_(0.01, 16, generator=generator).log_()  # not 0, whose logarithm is -inf


def _unit(x: Tensor) -> Tensor:
    """Heads (…, D) of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
