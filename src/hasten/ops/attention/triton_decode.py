"""Decode attention on CUDA: one query a sequence, split over the keys (flash-decoding), in Triton.

Of plain tensors with a mask; ragged.py is for caches. A program takes `SPLIT` keys of one key/value head, for all the
query heads that share it, so that keys and values are read once; a second kernel adds the parts up in a fixed order.
The size of the parts is fixed: a sequence's result does not depend on what else is in the batch.

Import this file only where the kernel is taken; it imports Triton and registers the operator.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from hasten.ops.attention.flash_tiles import side
from hasten.ops.attention.spec import AttentionSpec
from hasten.ops.attention.triton_kernels import attend, combine
from hasten.ops.triton_support import readable

SPLIT = 128


@torch.library.custom_op("hasten_triton::decode_attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """q (B, H, D) -> (B, H, D). k, v (B, S, Hkv, D), mask (B, S); window, softcap 0: none."""
    batch, heads, size = q.shape
    dtype, keys, kv_heads = q.dtype, k.shape[1], k.shape[2]
    q, k, v = readable(q), readable(k), readable(v)
    splits = max(1, triton.cdiv(keys, SPLIT))
    parts = q.new_empty((batch, heads, splits, size), dtype=torch.float32)
    peaks, sums = parts.new_empty(2, batch, heads, splits).unbind()
    out = q.new_empty(q.shape)
    strides = (*k.stride()[:3], 0 if mask is None else mask.stride(0))
    with torch.cuda.device_of(q):
        attend[(splits, kv_heads, batch)](
            *(q.contiguous(), k, v, mask, parts, peaks, sums),
            *(keys, splits, *strides, scale),
            SOFTCAP=softcap,
            WINDOW=window,
            GROUP=heads // kv_heads,
            GROUP_SIDE=side(heads // kv_heads),
            D=size,
            D_SIDE=side(size),
            KEYS=SPLIT,
            BLOCK=64 if size <= 128 else 32,  # so that two stages of keys and values fit into shared memory
            num_warps=4,
            num_stages=2,
        )
        sides = {"D": size, "D_SIDE": side(size), "SPLITS_SIDE": triton.next_power_of_2(splits)}
        combine[(batch * heads,)](parts, peaks, sums, out, splits, **sides, num_warps=1)
    return out.to(dtype)


@operator.register_fake
def _fake(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def one_query(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, mask: Tensor | None = None) -> Tensor:
    """Attention of q (B, 1, H, D) over k, v (B, S, Hkv, D) as `reference` computes it; mask (B, 1, S) or (1, S)."""
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    rows = None
    if mask is not None:
        rows = mask[..., 0, :].expand(q.shape[0], -1)  # (B, S)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
    window = spec.window or 0 if mask is None else 0  # a mask has it inside
    return operator(q[:, 0], k, v, rows, spec.scale, window, spec.softcap or 0.0).unsqueeze(1)
