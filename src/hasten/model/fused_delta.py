"""Gated DeltaNet as the native steps of a CPU take it: the small parts beside its products, in one plan."""

from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.delta import GatedDeltaNet
from hasten.model.fused_linear import norm_fields
from hasten.model.mixer import StateMixer
from hasten.ops.native import native_ops

# Its products of the layer's input, in the order in which the native steps read them.
DELTA_INPUTS = ("query", "key", "value", "z", "beta", "decay")
# What `plan_block` takes for a block without attention.
NO_ATTENTION: dict[str, Any] = {
    "heads": 0,
    "kv_heads": 0,
    "head_dim": 0,
    "q_norm": None,
    "k_norm": None,
    "head_norm": 0,
}
NO_ATTENTION |= {"rope_pairs": False, "scale": 0.0, "window": 0, "softcap": 0.0, "sinks": None}
NO_ATTENTION |= {"attention_gate": False, "v_norm": None, "written": 2}


class DeltaParts(nn.Module):
    """What Gated DeltaNet has beside its products: sizes, convolution, decay, and the norm of its heads."""

    def __init__(self, delta: StateMixer) -> None:
        super().__init__()
        assert isinstance(delta, GatedDeltaNet), "other kinds are refused"
        self.sizes, self.conv, self.value_norm = delta.sizes, delta.conv, delta.value_norm
        self.log_rate, self.rate_bias = delta.log_rate, delta.rate_bias

    @torch.no_grad()
    def plan(self) -> Tensor:
        """The parts as `plan_block` takes them."""
        plan: Tensor = native_ops().plan_delta.default(
            conv=self.conv.weight[:, 0].float().contiguous(),
            rate=self.log_rate.float().exp(),
            rate_bias=self.rate_bias.detach().float(),
            **norm_fields(self.value_norm),
            key_heads=self.sizes.key_heads,
            key_dim=self.sizes.key_dim,
            value_dim=self.sizes.value_dim,
        )
        return plan

    def give_to(self, delta: StateMixer) -> None:
        """Make them the parts of a readable layer again."""
        assert isinstance(delta, GatedDeltaNet), "other kinds are refused"
        delta.conv, delta.value_norm = self.conv, self.value_norm
        delta.log_rate, delta.rate_bias = self.log_rate, self.rate_bias
