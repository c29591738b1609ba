"""Gated DeltaNet in a block's place of attention (arXiv 2412.06464): what it keeps of a text has the same size always.

B: sequences, T: tokens of each, C: hidden size, Hk: heads of queries and keys of size Dk, H: heads of values of size
Dv, K: tokens of the convolution; its channels are those of all queries, keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.config import ModelConfig
from hasten.model.norms import RMSNorm
from hasten.ops.delta import DeltaState, causal_convolution, delta_rule

if TYPE_CHECKING:
    from hasten.model.interfaces import StateContext
    from hasten.model.mlp import Linear

_EPS = 1e-6  # added to the squared length of a query or key


class GatedDeltaNet(nn.Module):
    """Short convolution, delta rule with decay, a norm of each head's output, an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes, hidden = config.delta, config.hidden_size
        assert sizes is not None, "a layer with Gated DeltaNet has its sizes in the config"
        self.sizes = sizes
        keys, values, heads = sizes.keys, sizes.values, sizes.value_heads
        self.query: Linear = nn.Linear(hidden, keys, bias=False)
        self.key: Linear = nn.Linear(hidden, keys, bias=False)
        self.value: Linear = nn.Linear(hidden, values, bias=False)
        self.z: Linear = nn.Linear(hidden, values, bias=False)  # of the output gate
        self.beta: Linear = nn.Linear(hidden, heads, bias=False)
        self.decay: Linear = nn.Linear(hidden, heads, bias=False)
        self.conv = nn.Conv1d(sizes.channels, sizes.channels, sizes.kernel, groups=sizes.channels, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.rate_bias = nn.Parameter(torch.empty(heads))
        self.value_norm = RMSNorm(sizes.value_dim, config.norm_eps, 0.0)
        self.out: Linear = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor, layer: StateContext) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        mixed = torch.cat((self.query(x), self.key(x), self.value(x)), dim=-1)  # (B, T, channels)
        rate = self.log_rate.float().exp() * F.softplus(self.decay(x).float() + self.rate_bias.float())  # (B, T, H)
        y = layer.recur(self.mix, mixed, -rate, self.beta(x).float().sigmoid())  # (B, T, H, Dv) float32
        gate = F.silu(self.z(x).float()).unflatten(-1, (self.sizes.value_heads, -1))
        return self.out((self.value_norm(y) * gate).flatten(-2).to(x.dtype))

    def mix(self, state: DeltaState | None, mixed: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, DeltaState]:
        """Outputs (n, L, H, Dv) of n sequences' next L tokens, and the state after them; see `StateContext`."""
        sizes = self.sizes
        before = None if state is None else state.inputs
        mixed, inputs = causal_convolution(mixed, self.conv.weight[:, 0], before)
        q, k, v = F.silu(mixed).split((sizes.keys, sizes.keys, sizes.values), dim=-1)
        q, k = (_unit(x.unflatten(-1, (sizes.key_heads, -1))) for x in (q, k))
        v = v.unflatten(-1, (sizes.value_heads, -1))
        y, matrix = delta_rule(q * sizes.key_dim**-0.5, k, v, decay, beta, None if state is None else state.matrix)
        return y, DeltaState(inputs, matrix)

    @torch.no_grad()
    def fill(self, generator: torch.Generator) -> None:
        """Fill the parameters that belong to no linear layer and no norm, as the published models were begun."""
        self.rate_bias.fill_(1.0)
        self.log_rate.uniform_(0.01, 16, generator=generator).log_()  # not 0, whose logarithm is -inf
        bound = self.sizes.kernel**-0.5
        self.conv.weight.uniform_(-bound, bound, generator=generator)


def _unit(x: Tensor) -> Tensor:
    """Heads (…, D) of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
