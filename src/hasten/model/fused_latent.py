"""Latent attention as the native steps of a CPU take it: its norms, and the weights of each head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hasten.model.config import LatentConfig
from hasten.model.fused_linear import norm_arguments, norm_fields, packed, weight_plan
from hasten.model.initialize import unfilled
from hasten.model.latent import LatentAttention
from hasten.ops.attention import AttentionSpec
from hasten.ops.linear import PackedLinear
from hasten.ops.native import native_ops
from hasten.ops.panels import PANEL


class LatentParts(nn.Module):
    """What latent attention has beside its products of whole rows.

    keys, values: the two halves of `kv_up`, which are multiplied head by head, those of keys transposed: (H·L', N) and
    (H·V', L), the rows of each head filled up to whole panels.
    """

    def __init__(self, attention: LatentAttention) -> None:
        super().__init__()
        self.sizes, self.heads = attention.sizes, attention.spec.heads
        self.kv_norm = attention.kv_norm
        self.q_norm = None if self.sizes.query_rank is None else attention.q_norm
        assert isinstance(attention.kv_up, nn.Linear), "it is never quantized"
        weight = attention.kv_up.weight.detach().unflatten(0, (self.heads, -1))  # (H, N + V, L)
        keys, values = weight.split((self.sizes.key_dim, self.sizes.value_dim), dim=1)
        self.keys, self.values = _of_heads(keys.transpose(1, 2)), _of_heads(values)

    def spec(self, expanded: AttentionSpec) -> AttentionSpec:
        """The attention over the cache."""
        return replace(expanded, kv_heads=1, head_dim=self.sizes.kept)

    def plan(self, up: Tensor | None) -> Tensor:
        """The parts as `plan_block` takes them. up: the plan of `q_up`."""
        plan: Tensor = native_ops().plan_latent.default(
            keys=weight_plan(self.keys),
            values=weight_plan(self.values),
            up=up,
            q_norm=None if self.q_norm is None else norm_arguments(self.q_norm)[0],
            **norm_fields(self.kv_norm),
            heads=self.heads,
            rank=self.sizes.rank,
            value_dim=self.sizes.value_dim,
            turned=self.sizes.turned_dim,
        )
        return plan

    def give_to(self, attention: LatentAttention) -> None:
        """Make them the parts of a readable layer again."""
        attention.kv_norm = self.kv_norm
        if self.q_norm is not None:
            attention.q_norm = self.q_norm
        keys = _rows_of(self.keys, self.heads, self.sizes.rank).transpose(1, 2)  # (H, N, L)
        weight = torch.cat((keys, _rows_of(self.values, self.heads, self.sizes.value_dim)), dim=1)
        attention.kv_up = _linear(weight.flatten(0, 1))


def inputs_of(sizes: LatentConfig) -> tuple[str, ...]:
    """The products of a layer's input, in the order in which the native steps read them."""
    return ("q" if sizes.query_rank is None else "q_down", "kv_down")


def _of_heads(weight: Tensor) -> PackedLinear:
    """Pack a weight (H, n, K) whose heads begin at panels."""
    return packed(_linear(pad(weight, (0, 0, 0, -weight.shape[1] % PANEL)).flatten(0, 1)))


def _rows_of(linear: PackedLinear, heads: int, rows: int) -> Tensor:
    """The weight (H, n, K) that `_of_heads` packed."""
    return linear.numbers().values.unflatten(0, (heads, -1))[:, :rows]


def _linear(weight: Tensor) -> nn.Linear:
    with unfilled():
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return made
