"""Shapes of what native.cpp and train.cpp return, for torch.compile."""

from typing import Any

import torch
from torch import Tensor


def attention(q: Tensor, *rest: Any) -> Tensor:
    """(R, H, D), contiguous."""
    return q.new_empty(q.shape)


def train_attention(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D) and the log-sum-exp (B, H, T)."""
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


def train_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, contiguous."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
