"""Explicit attention: the whole T×S score matrix in float32, step by step. Slow, and obviously right."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention.inputs import PLAIN, AttentionInputs, alibi_bias, positions, visibility
from hasten.ops.attention.spec import AttentionSpec


def reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D); returns (B, T, H, D) in q's dtype.

    Scores and softmax are computed in float32 whatever the tensors' dtype (in their own if they are float64). A query
    that sees no key gives zeros. See `AttentionSpec`, `AttentionInputs` and `hasten.ops.attention.attention`.
    """
    groups = spec.groups
    wide = torch.promote_types(q.dtype, torch.float32)
    # Scaling both factors by √scale keeps every product small, so that half precision cannot overflow.
    root = abs(spec.scale) ** 0.5
    qs = (q.to(wide) * (root if spec.scale >= 0 else -root)).transpose(1, 2)  # (B, H, T, D)
    ks = (k.to(wide) * root).transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, S, D)
    vs = v.to(wide).transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, S, D)
    scores = (qs @ ks.transpose(-1, -2)).to(wide)  # (B, H, T, S); autocast multiplies in half precision all the same
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    queries, keys = q.shape[1], k.shape[1]
    if inputs.bias is not None:
        scores = scores + inputs.bias
    if inputs.alibi is not None:
        query_places, key_places, _ = positions(queries, keys, inputs.documents, q.device)
        scores = scores + alibi_bias(inputs.alibi.to(wide), query_places, key_places)
    seen = visibility(queries, keys, spec, inputs, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if inputs.sinks is None:
        probabilities = scores.softmax(dim=-1)
    else:  # of one key more in each row, whose value is zero
        sinks = inputs.sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)  # (B, H, T, 1)
        probabilities = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    if seen is not None and inputs.hides_keys:  # causality always leaves a query its own key
        probabilities = probabilities.masked_fill(~seen.any(dim=-1, keepdim=True), 0)
    if inputs.dropout:
        probabilities = F.dropout(probabilities, inputs.dropout)
    return (probabilities @ vs).transpose(1, 2).to(q.dtype)
