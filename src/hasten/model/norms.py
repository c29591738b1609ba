"""The two norms of the supported families, computed in float32 whatever the weights' dtype."""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.config import ModelConfig


def over_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset), in float32 (arXiv 1910.07467).

    has_weight: whether the weight is a parameter; else it is ones, which no checkpoint holds.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, offset: float, *, has_weight: bool = True) -> None:
        super().__init__()
        self.eps, self.offset, self.has_weight = eps, offset, has_weight
        if has_weight:
            self.weight = nn.Parameter(torch.empty(size))
        else:
            with torch.device("cpu"):  # also where a model is made on the meta device
                self.register_buffer("weight", torch.ones(size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (over_rms(x, self.eps) * (self.weight.float() + self.offset)).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move as nn.Module does, but make the ones again, which `to_empty` would lose."""
        before = self.weight
        super()._apply(fn, recurse)
        if not self.has_weight and self.weight is not before:
            self.weight = torch.ones_like(self.weight)
        return self


class LayerNorm(nn.LayerNorm):
    """PyTorch's layer norm with the factor weight + offset, kept in float32 for half-precision weights."""

    def __init__(self, size: int, eps: float, offset: float, *, bias: bool) -> None:
        super().__init__(size, eps=eps, bias=bias)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        weight = weight + self.offset if self.offset else weight
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def norm_of(config: ModelConfig, size: int, *, there: bool = True) -> nn.Module:
    """Create a norm of the model's kind over `size` features, uninitialized; where it is not there, the identity."""
    if not there:
        return nn.Identity()
    if config.norm == "rmsnorm":
        return RMSNorm(size, config.norm_eps, config.norm_offset, has_weight=config.norm_weights)
    return LayerNorm(size, config.norm_eps, config.norm_offset, bias=config.norm_bias)


def place_ones(model: nn.Module, *, device: torch.device | None, dtype: torch.dtype) -> None:
    """Move the ones of norms without weights to the device and dtype of a model's weights (None: any device)."""
    for module in model.modules():
        if isinstance(module, RMSNorm) and not module.has_weight:
            module.to(device=device, dtype=dtype)
