"""Layers that keep states as the native steps of a CPU take them: the small parts beside their products, as a plan."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.fused_linear import norm_fields
from hasten.model.mixer import StateMixer
from hasten.model.mixer_config import ConvolutionConfig, DeltaConfig, MambaConfig, MixerConfig
from hasten.ops.native import native_ops

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
NO_ATTENTION |= {"attention_gate": False, "v_norm": None, "written": 2, "latent": None}


class MixerParts(nn.Module):
    """What a layer that keeps a state has beside its products: sizes, convolution, and parameters of its kind."""

    def __init__(self, mixer: StateMixer) -> None:
        super().__init__()
        self.sizes: Any = mixer.sizes
        for name, child in mixer.named_children():
            if name not in (*self.sizes.inputs, "out"):
                self.add_module(name, child)
        for name, parameter in mixer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @torch.no_grad()
    def plan(self) -> Tensor:
        """The parts as `plan_block` takes them."""
        conv: Any = self.conv
        bias = None if conv.bias is None else conv.bias.detach().float()
        return _PLANS[type(self.sizes)](self, conv.weight[:, 0].float().contiguous(), bias)

    def give_to(self, mixer: StateMixer) -> None:
        """Make them the parts of a readable layer again."""
        for name, part in (*self.named_children(), *self.named_parameters(recurse=False)):
            setattr(mixer, name, part)


def _delta(own: Any, conv: Tensor, _: Tensor | None) -> Tensor:
    return native_ops().plan_delta.default(
        conv=conv,
        rate=own.log_rate.float().exp(),
        rate_bias=own.rate_bias.detach().float(),
        **norm_fields(own.value_norm),
        key_heads=own.sizes.key_heads,
        key_dim=own.sizes.key_dim,
        value_dim=own.sizes.value_dim,
    )


def _short_convolution(_: Any, conv: Tensor, bias: Tensor | None) -> Tensor:
    return native_ops().plan_short_convolution.default(conv=conv, bias=bias)


def _mamba(own: Any, conv: Tensor, bias: Tensor | None) -> Tensor:
    return native_ops().plan_mamba.default(
        conv=conv,
        bias=bias,
        rate=own.log_rate.float().exp(),
        step_bias=own.step_bias.detach().float(),
        skip=own.skip.detach().float(),
        **norm_fields(own.value_norm),
        groups=own.sizes.groups,
        state_dim=own.sizes.state_dim,
        head_dim=own.sizes.head_dim,
    )


# The plan of each kind that the native steps have, of its parts and its convolution's factors and bias.
_PLANS: Mapping[type[MixerConfig], Callable[[Any, Tensor, Tensor | None], Tensor]] = {
    DeltaConfig: _delta,
    ConvolutionConfig: _short_convolution,
    MambaConfig: _mamba,
}
