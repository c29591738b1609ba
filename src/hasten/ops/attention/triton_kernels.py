"""The two Triton kernels of decode attention (triton_decode.py); importing this file imports Triton.

An argument that is None is known to the compiler: what would use it is not there.
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    q,  # (B, H, D)
    k,  # rows of head_dim values, at strides below
    v,
    mask,  # (B, S) bool
    parts,  # (B, H, splits, D) float32
    peaks,  # (B, H, splits) float32: largest score
    sums,  # (B, H, splits) float32: of exp(score - peak)
    keys,
    splits,
    sequence_stride,  # of k and v alike
    row_stride,
    head_stride,
    mask_stride,
    scale,
    SOFTCAP: tl.constexpr,  # 0: none
    WINDOW: tl.constexpr,  # 0: none
    GROUP: tl.constexpr,  # query heads of one key/value head
    GROUP_SIDE: tl.constexpr,
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
    KEYS: tl.constexpr,  # of a part
    BLOCK: tl.constexpr,  # keys at a time
):
    split, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, GROUP_SIDE)
    d = tl.arange(0, D_SIDE)
    heads = head * GROUP + g  # of the queries
    row = b * (tl.num_programs(1) * GROUP) + heads
    query = tl.load(q + row[:, None] * D + d[None, :], mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    low = split * KEYS
    high = tl.minimum(low + KEYS, keys)
    if WINDOW > 0:
        low = tl.maximum(low, keys - WINDOW)
    if mask is not None:  # a part that nobody sees is not read: of a long cache only what is filled
        span = split * KEYS + tl.arange(0, KEYS)
        some = tl.load(mask + b.to(tl.int64) * mask_stride + span, mask=span < keys, other=0).to(tl.int32)
        high = tl.where(tl.max(some, axis=0) > 0, high, low)
    base = b.to(tl.int64) * sequence_stride + head.to(tl.int64) * head_stride
    peak = tl.full((GROUP_SIDE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_SIDE,), dtype=tl.float32)
    acc = tl.zeros((GROUP_SIDE, D_SIDE), dtype=tl.float32)
    for start in range(low // BLOCK * BLOCK, high, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = (s >= low) & (s < high)
        if mask is not None:
            seen = seen & (tl.load(mask + b.to(tl.int64) * mask_stride + s, mask=seen, other=0) != 0)
        places = base + s.to(tl.int64) * row_stride
        inside = seen[:, None] & (d < D)[None, :]
        key = tl.load(k + places[:, None] + d[None, :], mask=inside, other=0.0)  # (BLOCK, D)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # (GROUP, BLOCK)
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # c·tanh(s / c)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: exp(-inf - 0), not -inf + inf
        shrink = tl.exp(peak - finite)
        p = tl.exp(scores - finite[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        value = tl.load(v + places[:, None] + d[None, :], mask=inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        peak = new_peak
    place = row.to(tl.int64) * splits + split
    tl.store(peaks + place, peak, mask=g < GROUP)
    tl.store(sums + place, total, mask=g < GROUP)
    tl.store(parts + place[:, None] * D + d[None, :], acc, mask=(g < GROUP)[:, None] & (d < D)[None, :])


@triton.jit
def combine(parts, peaks, sums, out, splits, D: tl.constexpr, D_SIDE: tl.constexpr, SPLITS_SIDE: tl.constexpr):
    """out (B·H, D): the parts weighted by what their scores were shifted by."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_SIDE)
    s = tl.arange(0, SPLITS_SIDE)
    peak = tl.load(peaks + row * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(peak, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)  # a query that sees no key at all gets zeros
    total = tl.sum(tl.load(sums + row * splits + s, mask=s < splits, other=0.0) * tl.exp(peak - top), axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    acc = tl.zeros((D_SIDE,), dtype=tl.float32)
    for split in range(splits):
        weight = tl.exp(tl.load(peaks + row * splits + split) - top)
        acc += weight * tl.load(parts + (row * splits + split) * D + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)
