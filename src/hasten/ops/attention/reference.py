"""Explicit attention: the whole T×S score matrix in float32, step by step. Slow, and obviously right."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention.masks import causal
from hasten.ops.attention.spec import AttentionSpec


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D); returns (B, T, H, D) in q's dtype.

    mask (B, T, S) or (T, S), True where a query sees a key, replaces the causal mask. Scores and softmax are computed
    in float32 whatever the inputs' dtype (in their own if they are float64). A query that sees no key gives NaN.
    """
    groups = spec.heads // spec.kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    # Scaling both factors by √scale keeps every product small, so that half precision cannot overflow.
    root = spec.scale**0.5
    qs = (q.to(wide) * root).transpose(1, 2)  # (B, H, T, D)
    ks = (k.to(wide) * root).transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, S, D)
    vs = v.to(wide).transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, S, D)
    scores = qs @ ks.transpose(-1, -2)  # (B, H, T, S)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is None:
        mask = causal(q.shape[1], k.shape[1], spec.window, q.device)
    elif mask.dim() == 3:
        mask = mask.unsqueeze(1)  # (B, 1, T, S)
    probabilities = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    if dropout:
        probabilities = F.dropout(probabilities, dropout)
    return (probabilities @ vs).transpose(1, 2).to(q.dtype)
