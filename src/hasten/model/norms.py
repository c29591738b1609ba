"""The two norms of the supported families, computed in float32 whatever the weights' dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.config import ModelConfig


def over_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset), in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return (over_rms(x, self.eps) * (self.weight.float() + self.offset)).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """PyTorch's layer norm with the factor weight + offset, kept in float32 for half-precision weights."""

    def __init__(self, size: int, eps: float, offset: float, *, bias: bool) -> None:
        super().__init__(size, eps=eps, bias=bias)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        weight = weight + self.offset if self.offset else weight
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def norm_of(config: ModelConfig, size: int) -> nn.Module:
    """Create a norm of the model's kind over `size` features, uninitialized."""
    if config.norm == "rmsnorm":
        return RMSNorm(size, config.norm_eps, config.norm_offset)
    return LayerNorm(size, config.norm_eps, config.norm_offset, bias=config.norm_bias)
