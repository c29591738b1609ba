"""Mamba-2 in a block's place of attention (arXiv 2405.21060): a state space model with a decay for each head.

B: sequences, T: tokens of each, C: hidden size, G: groups of keys and queries of size N, H: heads of values of size P,
K: tokens of the convolution; its channels are those of all values, keys and queries. The paper's x, B and C are value,
key and query here, its Δ is step, and its D is skip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.mixer import StateMixer
from hasten.model.mixer_config import MambaConfig
from hasten.model.norms import RMSNorm, over_rms
from hasten.ops.ssd import scan
from hasten.ops.states import State, causal_convolution

if TYPE_CHECKING:
    from hasten.model.interfaces import StateContext
    from hasten.model.mlp import Linear


class Mamba2(StateMixer):
    """Convolution, h ← e^(ΔA) h + Δ B xᵀ and y = C h + D x, an output gate, a norm of each group's output."""

    sizes: MambaConfig
    z: Linear  # of the output gate
    value: Linear
    key: Linear
    query: Linear
    step: Linear

    def __init__(self, sizes: MambaConfig, hidden: int, eps: float) -> None:
        super().__init__(sizes, hidden)
        self.log_rate = nn.Parameter(torch.empty(sizes.heads))
        self.step_bias = nn.Parameter(torch.empty(sizes.heads))
        self.skip = nn.Parameter(torch.empty(sizes.heads))
        self.value_norm = RMSNorm(sizes.values, eps, 0.0)

    def forward(self, x: Tensor, layer: StateContext) -> Tensor:
        mixed = torch.cat((self.value(x), self.key(x), self.query(x)), dim=-1)  # (B, T, channels)
        step = F.softplus(self.step(x).float() + self.step_bias.float())  # (B, T, H)
        y = layer.recur(self.mix, mixed, step)  # (B, T, H, P) float32
        gated = y.flatten(-2) * F.silu(self.z(x).float())
        normal = over_rms(gated.unflatten(-1, (self.sizes.groups, -1)), self.value_norm.eps).flatten(-2)
        return self.out((normal * self.value_norm.weight.float()).to(x.dtype))

    def mix(self, state: State | None, mixed: Tensor, step: Tensor) -> tuple[Tensor, State]:
        """Outputs (n, L, H, P) of n sequences' next L tokens, and the state after them; see `StateContext`."""
        sizes = self.sizes
        before = None if state is None else state["inputs"]
        mixed, inputs = causal_convolution(mixed, self.conv.weight[:, 0], before, self.conv.bias)
        v, k, q = F.silu(mixed).split((sizes.values, sizes.keys, sizes.keys), dim=-1)
        q, k = (x.unflatten(-1, (sizes.groups, -1)) for x in (q, k))
        v = v.unflatten(-1, (sizes.heads, -1))
        decay = -self.log_rate.float().exp() * step
        y, matrix = scan(q, k, v * step[..., None], decay, None if state is None else state["matrix"])
        return y + self.skip.float()[:, None] * v, {"inputs": inputs, "matrix": matrix}

    @staticmethod
    def fill(leaf: str, values: Tensor, generator: torch.Generator) -> None:
        if leaf == "log_rate":
            values.copy_(torch.arange(1, len(values) + 1, device=values.device).log())
        else:
            values.fill_(1.0)
