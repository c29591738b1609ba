"""Triton kernels between the products of a GPU's fused block (triton_steps.py). Importing this file imports Triton."""

import triton
import triton.language as tl


@triton.jit
def place_heads(
    qkv,  # (R, …) rows at qkv_stride: heads of q, then of k, then of v
    cos,  # (R, HALF) float32
    sin,
    q_weight,  # (D,) of the norms of q and k, both or none
    k_weight,
    slots,  # (R,) the cache's row of each, -1: nowhere
    q_out,  # (R, HEADS, D)
    k,  # rows of head_dim values, at strides below
    v,
    qkv_stride,
    row_stride,
    head_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
    HALF: tl.constexpr,  # half of the elements that are turned
    BLOCK: tl.constexpr,  # heads of a program
):
    """The norms of q and k, the rotary turn, and the cache's new rows."""
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D_SIDE)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < D)[None, :]
    base = qkv + row.to(tl.int64) * qkv_stride + head[:, None] * D
    x = tl.load(base + d[None, :], mask=inside, other=0.0).to(tl.float32)
    turns = (head < HEADS + KV_HEADS)[:, None]
    is_query = (head < HEADS)[:, None]
    y = x
    other = tl.where(d < HALF, d + HALF, d - HALF)  # the element that one is turned with
    pair = inside & (d < 2 * HALF)[None, :]
    if q_weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        for_q = tl.load(q_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        for_k = tl.load(k_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y = tl.where(turns, x * inverse * (tl.where(is_query, for_q, for_k) + offset), x)
    if cos is not None:
        partner = tl.load(base + other[None, :], mask=pair, other=0.0).to(tl.float32)
        if q_weight is not None:
            near = d < 2 * HALF
            other_q = tl.load(q_weight + other, mask=near, other=0.0).to(tl.float32)[None, :]
            other_k = tl.load(k_weight + other, mask=near, other=0.0).to(tl.float32)[None, :]
            partner = partner * inverse * (tl.where(is_query, other_q, other_k) + offset)
        angle = row * HALF + tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=d < 2 * HALF, other=1.0)[None, :]
        s = tl.load(sin + angle, mask=d < 2 * HALF, other=0.0)[None, :]
        y = tl.where(turns, y * c + partner * tl.where((d < HALF)[None, :], -s, s), y)
    at_query = (row.to(tl.int64) * HEADS + head[:, None]) * D + d[None, :]
    tl.store(q_out + at_query, y.to(q_out.dtype.element_ty), mask=inside & is_query)
    slot = tl.load(slots + row).to(tl.int64)
    kept = inside & (slot >= 0)
    key = (head - HEADS).to(tl.int64)[:, None] * head_stride + slot * row_stride + d[None, :]
    tl.store(k + key, y.to(k.dtype.element_ty), mask=kept & turns & (head >= HEADS)[:, None])
    value = (head - HEADS - KV_HEADS).to(tl.int64)[:, None] * head_stride + slot * row_stride + d[None, :]
    tl.store(v + value, y.to(v.dtype.element_ty), mask=kept & (head >= HEADS + KV_HEADS)[:, None])


@triton.jit
def add_normed(x, y, weight, bias, out, size, eps, offset, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """out = x + norm(y), rows of `size`."""
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    there = i < size
    own = tl.load(y + row + i, mask=there, other=0.0).to(tl.float32)
    if CENTRED:
        own = tl.where(there, own - tl.sum(own, axis=0) / size, 0.0)
    normal = own * tl.rsqrt(tl.sum(own * own, axis=0) / size + eps)
    normal = normal * (tl.load(weight + i, mask=there, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        normal += tl.load(bias + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row + i, tl.load(x + row + i, mask=there, other=0.0) + normal, mask=there)
