"""PyTorch's scaled_dot_product_attention: one fused kernel that never writes the score matrix to memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention.masks import causal
from hasten.ops.attention.spec import AttentionSpec


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Same contract as `reference`, without soft-capping. PyTorch picks the backend (flash, memory-efficient, math)."""
    queries, keys = q.shape[1], k.shape[1]
    if queries == 1 and (mask is not None or spec.window is None or spec.window >= keys):
        return _one_query(q, k, v, spec=spec, mask=mask, dropout=dropout)
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


def _one_query(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None, dropout: float) -> Tensor:
    """A decode step: query heads that share a key head see the same keys, so they become the rows of one small matrix.

    PyTorch's grouped-query path walks through the keys once for every query head instead.
    """
    groups = spec.heads // spec.kv_heads
    rows = q[:, 0].unflatten(1, (spec.kv_heads, groups))  # (B, Hkv, G, D)
    if groups == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # One row of half precision takes the kernel's slow path; two equal ones do not.
        rows = rows.expand(-1, -1, 2, -1)
    out = F.scaled_dot_product_attention(
        rows,
        k.transpose(1, 2),  # (B, Hkv, S, D)
        v.transpose(1, 2),
        attn_mask=mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask,  # (B, 1, 1, S)
        dropout_p=dropout,
        scale=spec.scale,
    )
    return out[:, :, :groups].flatten(1, 2).unsqueeze(1)  # (B, 1, H, D)
