"""FlashAttention-2's backward pass in Triton, two kernels (flash_triton.py, docs/in-depth/flash-attention.md).

With P the probabilities, computed again from q, k and the log-sum-exp, O = P·V, and dO what comes back:
dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP - D) with D the row sums of dO ∘ O, dQ = scale · dS·K, dK = scale · dSᵀ·Q.
"""

import triton
import triton.language as tl

from hasten.ops.attention.flash_triton_kernels import (
    capped,
    existing,
    head_base,
    keys_of_tile,
    load_tile,
    place,
    queries_of_tile,
    store_tile,
    stretch,
    tile_start,
    visible,
)


@triton.jit
def load_terms(at, first, rows, BLOCK: tl.constexpr, CHECK: tl.constexpr, OTHER: tl.constexpr):
    """A number for each of BLOCK rows."""
    r = tl.arange(0, BLOCK)
    return tl.load(at + first + r, mask=first + r < rows, other=OTHER) if CHECK else tl.load(at + first + r)


@triton.jit
def walk_queries(
    acc, query, d_out, lse, delta, k, v, k_stride, v_stride, position, keys, low, high, window,
    start, whole, until, stop,
    C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One stretch of keys: probabilities again from the log-sum-exp, and with them the queries' gradient."""
    i = position + tl.arange(0, C.block_q)
    near, steps = stretch(start, whole, until, stop, C.block_k, MASKED)
    for step in range(steps):
        n = tile_start(step, near, start, whole, until, C.block_k, MASKED)
        key = load_tile(k, n, keys, k_stride, C.block_k, C, MASKED)
        x = capped(tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=acc.dtype), C)
        p = tl.exp2(x * C.factor - lse[:, None])
        if MASKED:
            seen = visible(i[:, None], n + tl.arange(0, C.block_k)[None, :], low, high, window, C)
            p = tl.where(seen, p, 0.0)
        if C.inner > 0:
            p = p * (1 - x * x)  # the slope of tanh
        value = load_tile(v, n, keys, v_stride, C.block_k, C, MASKED)
        dp = tl.dot(d_out, tl.trans(value), input_precision="ieee", out_dtype=acc.dtype)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit(do_not_specialize=["queries", "keys", "window"])
def backward_queries(
    q,
    k,
    v,
    out,
    d_out,  # the gradients of out and of lse
    d_lse,
    lse,
    log2_lse,  # (B, H, T), written: the log-sum-exp in powers of two, +inf for a query that sees nothing
    delta,  # (B, H, T), written: the sum of d_out · out, less d_lse
    dq,  # (B, T, H, D), written
    plan,
    bounds,
    q_strides,
    k_strides,
    v_strides,
    out_strides,  # of out and dq
    d_out_strides,
    queries,
    keys,
    window,
    C: tl.constexpr,
):
    """The gradient of a tile of queries, and the two row terms that `backward_keys` reads afterwards."""
    head, b = tl.program_id(1), tl.program_id(2)
    row, own, key_row, others, tile = place(plan, queries, keys, C.causal)
    first = tile * C.block_q
    r = first + tl.arange(0, C.block_q)
    at = (tl.cast(b, tl.int64) * tl.num_programs(1) + head) * queries + row + r
    grad = load_tile(head_base(d_out, d_out_strides, b, row, head), first, own, d_out_strides[1], C.block_q, C, True)
    result = load_tile(head_base(out, out_strides, b, row, head), first, own, out_strides[1], C.block_q, C, True)
    kind = lse.dtype.element_ty
    term = tl.sum(grad.to(kind) * result.to(kind), axis=1)
    if d_lse is not None:
        term -= tl.load(d_lse + at, mask=r < own, other=0.0)
    row_lse = tl.load(lse + at, mask=r < own, other=float("-inf"))
    nothing = row_lse == float("-inf")  # was seen: then every probability is 2^(x - inf) = 0, and nothing comes back
    row_lse = tl.where(nothing, float("inf"), row_lse * 1.4426950408889634)  # log2(e)
    term = tl.where(nothing, 0.0, term)
    tl.store(log2_lse + at, row_lse, mask=r < own)
    tl.store(delta + at, term, mask=r < own)
    query = load_tile(head_base(q, q_strides, b, row, head), first, own, q_strides[1], C.block_q, C, True)
    key = head_base(k, k_strides, b, key_row, head // C.group)
    value = head_base(v, v_strides, b, key_row, head // C.group)
    low, high = existing(bounds, b, others)
    start, whole, until, stop = keys_of_tile(first, own, others, low, high, window, C)
    position = first + others - own
    acc = tl.full((C.block_q, C.d_side), 0.0, dtype=kind)
    for masked in tl.static_range(1, -1, -1):
        acc = walk_queries(
            acc, query, grad, row_lse, term, key, value, k_strides[1], v_strides[1], position, others, low, high,
            window, start, whole, until, stop, C, masked,
        )  # fmt: skip
    store_tile(head_base(dq, out_strides, b, row, head), first, own, out_strides[1], acc * C.scale, C.block_q, C)


@triton.jit
def walk_keys(
    dk, dv, key, value, q, d_out, lse, delta, q_stride, d_out_stride, first, queries, keys, low, high, window,
    start, whole, until, stop,
    C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients from one range of one head's queries; all tiles are transposed, (keys, queries)."""
    j = first + tl.arange(0, C.block_k)
    near, steps = stretch(start, whole, until, stop, C.block_q, MASKED)
    for step in range(steps):
        m = tile_start(step, near, start, whole, until, C.block_q, MASKED)
        query = load_tile(q, m, queries, q_stride, C.block_q, C, MASKED)
        x = capped(tl.dot(key, tl.trans(query), input_precision="ieee", out_dtype=dk.dtype), C)
        # Queries beyond the last are zeros with a log-sum-exp of +inf: they add nothing.
        p = tl.exp2(x * C.factor - load_terms(lse, m, queries, C.block_q, MASKED, float("inf"))[None, :])
        if MASKED:
            r = m + tl.arange(0, C.block_q)
            seen = visible((r + keys - queries)[None, :], j[:, None], low, high, window, C)
            p = tl.where(seen, p, 0.0)
        grad = load_tile(d_out, m, queries, d_out_stride, C.block_q, C, MASKED)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee", out_dtype=dv.dtype)
        if C.inner > 0:
            p = p * (1 - x * x)
        dp = tl.dot(value, tl.trans(grad), input_precision="ieee", out_dtype=dk.dtype)
        ds = p * (dp - load_terms(delta, m, queries, C.block_q, MASKED, 0.0)[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision="ieee", out_dtype=dk.dtype)
    return dk, dv


@triton.jit(do_not_specialize=["queries", "keys", "window"])
def backward_keys(
    q,
    k,
    v,
    d_out,
    log2_lse,
    delta,
    dk,  # (B, S, Hkv, D), written
    dv,
    plan,  # of the keys' tiles
    bounds,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    dk_strides,  # of dk and dv
    queries,
    keys,
    window,
    C: tl.constexpr,
):
    """The gradients of a tile of keys and values: all query heads that share them, one after the other."""
    kv_head, b = tl.program_id(1), tl.program_id(2)
    row, others, key_row, own, tile = place(plan, queries, keys, False)
    first = tile * C.block_k
    key = load_tile(head_base(k, k_strides, b, key_row, kv_head), first, own, k_strides[1], C.block_k, C, True)
    value = load_tile(head_base(v, v_strides, b, key_row, kv_head), first, own, v_strides[1], C.block_k, C, True)
    low, high = existing(bounds, b, own)
    start, whole, until, stop = queries_of_tile(first, others, own, low, high, window, C)
    dk_tile = tl.full((C.block_k, C.d_side), 0.0, dtype=delta.dtype.element_ty)
    dv_tile = tl.full((C.block_k, C.d_side), 0.0, dtype=delta.dtype.element_ty)
    for g in range(C.group):
        head = kv_head * C.group + g
        query = head_base(q, q_strides, b, row, head)
        grad = head_base(d_out, d_out_strides, b, row, head)
        at = (tl.cast(b, tl.int64) * (tl.num_programs(1) * C.group) + head) * queries + row
        for masked in tl.static_range(1, -1, -1):
            dk_tile, dv_tile = walk_keys(
                dk_tile, dv_tile, key, value, query, grad, log2_lse + at, delta + at, q_strides[1], d_out_strides[1],
                first, others, own, low, high, window, start, whole, until, stop,
                C, masked,
            )  # fmt: skip
    place_k = head_base(dk, dk_strides, b, key_row, kv_head)
    place_v = head_base(dv, dk_strides, b, key_row, kv_head)
    store_tile(place_k, first, own, dk_strides[1], dk_tile * C.scale, C.block_k, C)
    store_tile(place_v, first, own, dk_strides[1], dv_tile, C.block_k, C)


@triton.jit(do_not_specialize=["queries"])
def row_terms(
    out,  # (B, T, H, D)
    d_out,
    d_lse,  # (B, H, T), as the three below
    lse,
    log2_lse,  # written: the log-sum-exp in powers of two
    delta,  # written: the sum of d_out · out, less d_lse
    out_strides,
    d_out_strides,
    queries,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the backward pass needs of each row, for kernels that do not compute it beside their own work."""
    head, b = tl.program_id(1), tl.program_id(2)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (r < queries)[:, None]
    d = tl.arange(0, D)[None, :]
    own = head_base(out, out_strides, b, 0, head) + tl.cast(r, tl.int64)[:, None] * out_strides[1] + d
    grad = head_base(d_out, d_out_strides, b, 0, head) + tl.cast(r, tl.int64)[:, None] * d_out_strides[1] + d
    products = tl.load(own, mask=there, other=0.0).to(tl.float32) * tl.load(grad, mask=there, other=0.0).to(tl.float32)
    at = (tl.cast(b, tl.int64) * tl.num_programs(1) + head) * queries + r
    term = tl.sum(products, axis=1)
    if d_lse is not None:
        term -= tl.load(d_lse + at, mask=r < queries, other=0.0)
    tl.store(delta + at, term, mask=r < queries)
    tl.store(log2_lse + at, tl.load(lse + at, mask=r < queries, other=0.0) * 1.4426950408889634, mask=r < queries)
