"""PyTorch's scaled_dot_product_attention: one fused kernel that never writes the score matrix to memory."""

import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention.masks import causal
from hasten.ops.attention.spec import AttentionSpec


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Same contract as `reference`, without soft-capping. PyTorch picks the backend (flash, memory-efficient, math)."""
    queries, keys = q.shape[1], k.shape[1]
    # PyTorch aligns `is_causal` to the top left, so it is our causal attention only when the lengths are equal.
    square = mask is None and queries == keys and (spec.window is None or spec.window >= keys)
    if mask is None and not square:
        mask = causal(queries, keys, spec.window, q.device)
    elif mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)  # (B, 1, T, S)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # (B, H, T, D)
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=square,
        scale=spec.scale,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    return out.transpose(1, 2)
