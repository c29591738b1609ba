"""Attention: `attention(q, k, v)` for anybody, and the kernels behind it.

All kernels share one signature, `kernel(q, k, v, *, spec, mask=None, dropout=0.0, …)`, with q of shape (B, T, H, D) and
k, v of shape (B, S, Hkv, D); H is a multiple of Hkv, and query head h reads key/value head h // (H // Hkv).

`from hasten.ops import attention` gives this package, which can be called like the function.
"""

import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from hasten.ops.attention.in_transformers import replace_in
from hasten.ops.attention.masks import alibi_slopes
from hasten.ops.attention.operator import KERNELS, attention
from hasten.ops.attention.request import AttentionRequest
from hasten.ops.attention.spec import AttentionSpec

__all__ = ["KERNELS", "AttentionRequest", "AttentionSpec", "alibi_slopes", "attention", "replace_in"]


class _Operator(ModuleType):
    """A package that is also the function it is named after."""

    def __call__(self, *tensors: Tensor, **options: Any) -> Tensor:
        return attention(*tensors, **options)


sys.modules[__name__].__class__ = _Operator
