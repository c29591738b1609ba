"""Shapes of what activation.cpp returns, for torch.compile."""

import torch
from torch import Tensor


def bias_gelu(z: Tensor, bias: Tensor | None) -> Tensor:
    """As z, contiguous."""
    return z.new_empty(z.shape)


def bias_gelu_backward(dout: Tensor, z: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of z, and of the bias in float32."""
    return z.new_empty(z.shape), z.new_empty(z.shape[-1:], dtype=torch.float32)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As gate, contiguous."""
    return gate.new_empty(gate.shape)


def silu_mul_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)
