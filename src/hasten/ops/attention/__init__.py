"""Attention: `attention(q, k, v)` for anybody, and the kernels behind it.

All kernels are called as kernel(q, k, v, spec, inputs), with q of shape (B, T, H, D) and k, v of shape (B, S, Hkv, D);
H is a multiple of Hkv, and query head h reads key/value head h // (H // Hkv).
"""

from hasten.ops.attention.inputs import AttentionInputs, alibi_slopes
from hasten.ops.attention.integrations import multi_head_attention_forward, replace_in
from hasten.ops.attention.layer import LayerAttention
from hasten.ops.attention.operator import KERNELS, attention
from hasten.ops.attention.spec import AttentionRequest, AttentionSpec

__all__ = [
    "KERNELS",
    "AttentionInputs",
    "AttentionRequest",
    "AttentionSpec",
    "LayerAttention",
    "alibi_slopes",
    "attention",
    "multi_head_attention_forward",
    "replace_in",
]
