"""Shapes of what the fused steps of block.cpp return, for torch.compile."""

from typing import Any

import torch
from torch import Tensor


def attention_input(x: Tensor, *rest: Any) -> Tensor:
    """q (R, H, D)."""
    heads, head_dim = rest[11], rest[12]
    return x.new_empty(x.shape[:-1].numel(), heads, head_dim)


def linear_add(x: Tensor, data: Tensor, scales: Any, zeros: Any, bias: Any, *rest: Any) -> Tensor:
    """As the residual."""
    residual: Tensor = rest[2]
    return residual.new_empty(residual.shape)


def mlp_input(x: Tensor, *rest: Any) -> Tensor:
    """(…, I)."""
    return x.new_empty((*x.shape[:-1], rest[11]))


def norm_linear(x: Tensor, *rest: Any) -> Tensor:
    """(…, N) in float32."""
    return x.new_empty((*x.shape[:-1], rest[11]), dtype=torch.float32)


def blocks(x: Tensor, *rest: Any) -> Tensor:
    """As x."""
    return x.new_empty(x.shape)


def plan_weight(n: int, k: int, data: Tensor, *rest: Any) -> Tensor:
    """Bytes that only the native code can read; how many it alone knows."""
    return data.new_empty(0, dtype=torch.uint8)


def plan_block(
    kv_heads: int, norm_weight: Any, norm_bias: Any, eps: Any, offset: Any, centred: Any, *rest: Any
) -> Tensor:
    """As plan_weight."""
    return rest[0].new_empty(0, dtype=torch.uint8)
