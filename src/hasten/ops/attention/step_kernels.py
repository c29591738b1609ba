"""The Triton kernel of a decode step's attention (step.py): one query a sequence, straight from the product.

It does what place_heads (ops/block/triton_kernels.py) and attend (ragged_kernels.py) do one after the other. The first
of the programs that share a sequence's keys begins with the new key, which it also writes; the cache has all others.
Importing this file imports Triton.
"""

import triton
import triton.language as tl

from hasten.ops.attention.ragged_kernels import add_parts, blocks_of, take_keys


@triton.jit
def turned(at, inside, weight, cos, sin, eps, offset, D: tl.constexpr, D_SIDE: tl.constexpr, HALF: tl.constexpr):
    """Heads at `at` (M, 1), normed and turned, float32 (M, D_SIDE). weight (D,) of a norm; cos, sin: of this token."""
    d = tl.arange(0, D_SIDE)
    x = tl.load(at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = x
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        y = x * inverse * (tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32) + offset)[None, :]
    if cos is not None:
        near = d < 2 * HALF
        other = tl.where(d < HALF, d + HALF, d - HALF)  # the element that one is turned with
        partner = tl.load(at + other[None, :], mask=inside & near[None, :], other=0.0).to(tl.float32)
        if weight is not None:
            own = tl.load(weight + other, mask=near, other=0.0).to(tl.float32) + offset
            partner = partner * inverse * own[None, :]
        angle = tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=near, other=1.0)
        s = tl.load(sin + angle, mask=near, other=0.0)
        y = y * c[None, :] + partner * tl.where(d < HALF, -s, s)[None, :]
    return y


@triton.jit(do_not_specialize=["rows", "blocks", "block_size", "slots"])  # one kernel for all steps
def attend_new(
    qkv,  # (B, …) rows at qkv_stride: heads of q, then of k, then of v
    cos,  # (B, HALF) float32
    sin,
    q_weight,  # (D,) of the norms of q and k, both or none
    k_weight,
    slot_mapping,  # (B,) the cache's row of each token, -1: nowhere
    k,  # rows of head_dim values, at strides below
    v,
    lengths,  # (B,) with the new token
    first,  # (B,)
    table,  # (B, blocks)
    out,  # (B, H, D)
    parts,  # as those of `attend`
    peaks,
    sums,
    counters,
    rows,  # B
    blocks,
    block_size,
    slots,  # rows of the cache
    qkv_stride,
    row_stride,
    head_stride,
    eps,
    offset,
    factor,
    inner,  # of a soft-cap, else None
    WINDOW: tl.constexpr,  # 0: none
    GROUP: tl.constexpr,  # query heads of one key/value head
    M: tl.constexpr,  # rows of a tile, at least GROUP
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
    HALF: tl.constexpr,  # half of the elements that are turned
    BLOCK: tl.constexpr,  # keys at a time
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, or the next power of two
    CHUNK: tl.constexpr,  # parts that are added up at once
):
    b, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    heads = kv_heads * GROUP
    m = tl.arange(0, M)
    d = tl.arange(0, D_SIDE)
    real = m < GROUP
    inside = real[:, None] & (d < D)[None, :]
    length = tl.load(lengths + b).to(tl.int32)
    cache_base = kv_head.to(tl.int64) * head_stride
    own = cache_base  # where the new key goes
    high = length - 1
    if table is not None:
        own_table = table + b.to(tl.int64) * blocks
        if PAGE > 0:
            high = tl.minimum(high, blocks * PAGE)  # a length beyond the table is an error that must not spread
    else:
        own_table = None
        own_first = tl.load(first + b).to(tl.int64)
        cache_base += own_first * row_stride
        high = tl.minimum(high, (slots - own_first).to(tl.int32))
    low = split * 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    low = low // BLOCK * BLOCK
    per = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK), tl.num_programs(2)) * BLOCK
    low += split * per
    stop = tl.minimum(low + per, high)
    whole = low
    if WINDOW == 0:
        whole = tl.maximum(stop // BLOCK * BLOCK, low)
    held = low * 0
    if table is not None:
        held = blocks_of(own_table, low + tl.arange(0, BLOCK), stop, blocks, block_size, PAGE)
    if cos is not None:
        cos += b * HALF
        sin += b * HALF
    base = qkv + b.to(tl.int64) * qkv_stride
    at = base + (kv_head * GROUP + m)[:, None] * D
    query = turned(at, inside, q_weight, cos, sin, eps, offset, D, D_SIDE, HALF).to(qkv.dtype.element_ty)
    one = (tl.arange(0, 1) + heads + kv_head)[:, None] * D  # of the new key
    there = (d < D)[None, :]
    new_key = turned(base + one, there, k_weight, cos, sin, eps, offset, D, D_SIDE, HALF).to(k.dtype.element_ty)
    new_value = tl.load(base + one + kv_heads * D + d[None, :], mask=there, other=0.0).to(v.dtype.element_ty)
    slot = tl.load(slot_mapping + b).to(tl.int64)
    own = own + slot * row_stride + d[None, :]
    writes = there & (split == 0) & (slot >= 0)
    tl.store(k + own, new_key, mask=writes)
    tl.store(v + own, new_value, mask=writes)
    score = tl.sum(query.to(tl.float32) * new_key.to(query.dtype).to(tl.float32), axis=1)  # (M,)
    if inner is not None:
        score = 1 - 2 / (1 + tl.exp2(score * inner))  # tanh
    begins = real & (split == 0) & (length > 0)
    peak = tl.where(begins, score * factor, float("-inf"))
    total = tl.where(begins, 1.0, 0.0)
    acc = tl.where(begins[:, None], new_value.to(tl.float32), 0.0)
    position = tl.where(real, length - 1, -1)
    for start in range(low, whole, BLOCK):
        peak, total, acc, held = take_keys(
            peak, total, acc, held, query, position, k, v, None, None, cache_base, own_table, start, stop,
            blocks, block_size, row_stride, factor, inner, WINDOW, D, D_SIDE, BLOCK, PAGE, False,
        )  # fmt: skip
    for start in range(whole, stop, BLOCK):
        peak, total, acc, held = take_keys(
            peak, total, acc, held, query, position, k, v, None, None, cache_base, own_table, start, stop,
            blocks, block_size, row_stride, factor, inner, WINDOW, D, D_SIDE, BLOCK, PAGE, True,
        )  # fmt: skip
    number = b.to(tl.int64) * heads + kv_head * GROUP + m  # of a query's head among B · H
    if not SPLIT:
        total = tl.where(total == 0.0, 1.0, total)  # padding sees no key at all, and gets zeros
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + number[:, None] * D + d[None, :], result, mask=inside)
    else:
        every = rows.to(tl.int64) * heads  # of a part
        place = split * every + number
        tl.store(peaks + place, peak, mask=real)
        tl.store(sums + place, total, mask=real)
        tl.store(parts + place[:, None] * D + d[None, :], acc, mask=inside)
        if counters is not None:
            tl.debug_barrier()
            counter = counters + b * kv_heads + kv_head
            done = tl.atomic_add(counter, 1, sem="acq_rel")
            if done == tl.num_programs(2) - 1:
                tl.store(counter, 0)
                g = tl.arange(0, ROWS)
                own_rows = b.to(tl.int64) * heads + kv_head * GROUP + g
                splits = tl.num_programs(2)
                add_parts(out, parts, peaks, sums, own_rows, every, g < GROUP, splits, ROWS, CHUNK, D, D_SIDE)
