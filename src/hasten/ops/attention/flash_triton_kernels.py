"""FlashAttention-2's forward pass in Triton, and what it shares with the backward pass (flash_triton_backward.py).

`forward` and `backward_queries` take all keys that a tile of queries sees past it, `backward_keys` all queries that see
a tile of keys. What a tile meets is cut in three: tiles of which something is hidden, at the near and at the far end
(the window's edge, the diagonal, the end of the sequence), and in between tiles that are seen whole and need no mask.
Those at the ends are walked through first. What nobody sees is not visited.

Scores are counted in powers of two: `factor` is the scale times log2(e), so that exp(scale · q·k) = 2^(factor · q·k).
With a soft-cap c, x = tanh(scale · q·k / c) takes the place of q·k, `inner` is 2·log2(e)·scale/c and factor c·log2(e).
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the compiler knows of a call, C in the kernels: a kernel is compiled for each.

    padded: not all keys of a sequence exist. group: query heads of one key/value head. d: the head size, d_side: its
    next power of two, as a tile has it. block_q, block_k: queries and keys of a tile. tl.zeros takes no such number as
    a size, tl.full does.
    """

    scale: float
    factor: float
    inner: float
    causal: bool
    has_window: bool
    padded: bool = False
    group: int
    d: int
    d_side: int
    block_q: int
    block_k: int


@triton.jit
def place(plan, queries, keys, REVERSED: tl.constexpr):
    """This program's sequence and tile: first query, number of queries, first key, number of keys, tile.

    plan (programs, 5) int32 says it for packed documents. REVERSED: causal rows get longer, and the longest go first.
    """
    p = tl.program_id(0)
    if plan is not None:
        p = plan + p * 5
        return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4)
    else:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        if REVERSED:
            p = tl.num_programs(0) - 1 - p
        return tl.cast(0, tl.int32), queries, tl.cast(0, tl.int32), keys, p


@triton.jit
def head_base(x, strides, b, row, head):
    """Where x (B, rows, heads, D) has this head's values of a row; beyond 2^31 elements, too."""
    place = tl.cast(b, tl.int64) * strides[0] + tl.cast(row, tl.int64) * strides[1]
    return x + place + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def load_tile(base, first, rows, stride, BLOCK: tl.constexpr, C: tl.constexpr, CHECK: tl.constexpr):
    """Rows first … first + BLOCK - 1, (BLOCK, D_SIDE); zeros beyond D and, with CHECK, beyond `rows`."""
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, C.d_side)
    at = base + tl.cast(first, tl.int64) * stride + (r[:, None] * stride + d[None, :])
    if CHECK and C.d == C.d_side:
        tile = tl.load(at, mask=(first + r < rows)[:, None], other=0.0)
    elif CHECK:
        tile = tl.load(at, mask=(first + r < rows)[:, None] & (d < C.d)[None, :], other=0.0)
    elif C.d == C.d_side:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(d < C.d)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(base, first, rows, stride, tile, BLOCK: tl.constexpr, C: tl.constexpr):
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, C.d_side)
    at = base + tl.cast(first, tl.int64) * stride + (r[:, None] * stride + d[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), mask=(first + r < rows)[:, None] & (d < C.d)[None, :])


@triton.jit
def existing(bounds, b, keys):
    """The first key of sequence b that exists, and where they end; bounds (B, 2) int32."""
    if bounds is not None:
        return tl.maximum(tl.load(bounds + 2 * b), 0), tl.minimum(tl.load(bounds + 2 * b + 1), keys)
    else:  # noqa: RET505
        return tl.cast(0, tl.int32), keys


@triton.jit
def visible(i, j, low, high, window, C: tl.constexpr):
    """Whether the query at position i sees key j, of which low … high - 1 exist; i and j broadcast."""
    seen = i >= j if C.causal else j < high  # causal: the last query is at the last key's position
    if C.padded:
        seen = seen & (j >= low) & (j < high)
    if C.has_window:
        seen = seen & (i - j < window)
    return seen


@triton.jit
def capped(products, C: tl.constexpr):
    if C.inner > 0:
        return 1 - 2 / (1 + tl.exp2(products * C.inner))  # tanh
    else:  # noqa: RET505
        return products


@triton.jit
def keys_of_tile(first, queries, keys, low, high, window, C: tl.constexpr):
    """Which keys a tile of queries meets: start, whole from, whole until, stop; all but stop are tiles' edges."""
    position = first + keys - queries  # of the first query; the last query is at the last key's position
    least = tl.cast(0, tl.int32)  # the first key that is seen
    whole = tl.cast(0, tl.int32)
    until = keys // C.block_k * C.block_k
    stop = keys
    if C.causal:
        until = tl.minimum(until, tl.maximum(position + 1, 0) // C.block_k * C.block_k)
        stop = tl.minimum(stop, position + C.block_q)
    stop = tl.where(first < queries, tl.maximum(stop, 0), 0)
    if C.has_window:
        least = tl.maximum(position - window + 1, 0)
        whole = tl.cdiv(tl.maximum(position + C.block_q - window, 0), C.block_k) * C.block_k
    if C.padded:
        least = tl.maximum(least, low)
        whole = tl.maximum(whole, tl.cdiv(low, C.block_k) * C.block_k)
        until = tl.minimum(until, high // C.block_k * C.block_k)
        stop = tl.where(least < tl.minimum(stop, high), tl.minimum(stop, high), 0)
    start = least // C.block_k * C.block_k
    whole = tl.minimum(whole, tl.cdiv(stop, C.block_k) * C.block_k)
    return start, whole, tl.maximum(tl.minimum(until, stop), whole), stop


@triton.jit
def queries_of_tile(first, queries, keys, low, high, window, C: tl.constexpr):
    """Which queries a tile of keys meets, in the same four numbers."""
    offset = keys - queries
    row = first - offset  # the query at the first key's position
    begin = first  # the tile's keys that exist
    end = tl.minimum(first + C.block_k, keys)
    if C.padded:
        begin = tl.maximum(begin, low)
        end = tl.minimum(end, high)
    start = tl.cast(0, tl.int32)
    whole = tl.cast(0, tl.int32)
    until = queries // C.block_q * C.block_q
    stop = queries
    if C.has_window:
        until = tl.minimum(until, tl.maximum(row + window, 0) // C.block_q * C.block_q)
        stop = tl.minimum(stop, end - offset - 1 + window)
    stop = tl.where(begin < end, tl.maximum(stop, 0), 0)
    if C.causal:
        start = tl.maximum(begin - offset, 0) // C.block_q * C.block_q
        whole = tl.cdiv(tl.maximum(row + C.block_k - 1, 0), C.block_q) * C.block_q
    if C.padded:  # a key that no query sees: nothing is whole
        whole = tl.where((first < low) | (end < tl.minimum(first + C.block_k, keys)), stop + C.block_q, whole)
    whole = tl.minimum(whole, tl.cdiv(stop, C.block_q) * C.block_q)
    return start, whole, tl.maximum(tl.minimum(until, stop), whole), stop


@triton.jit
def stretch(start, whole, until, stop, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """How many tiles a walk takes: with MASKED those at the near end, which come first, and all at both ends."""
    near = tl.maximum(whole - start, 0) // BLOCK
    return near, near + tl.cdiv(tl.maximum(stop - until, 0), BLOCK) if MASKED else (until - whole) // BLOCK


@triton.jit
def tile_start(step, near, start, whole, until, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The first row of a walk's tile."""
    if MASKED:
        first = tl.where(step < near, start + step * BLOCK, until + (step - near) * BLOCK)
    else:
        first = whole + step * BLOCK
    return first


@triton.jit
def walk_forward(
    acc, peak, total, query, k, v, k_stride, v_stride, position, keys, low, high, window, start, whole, until, stop,
    C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One stretch of keys: the running maximum, the running sum, and the output not yet divided by it."""
    i = position + tl.arange(0, C.block_q)
    near, steps = stretch(start, whole, until, stop, C.block_k, MASKED)
    for step in range(steps):
        n = tile_start(step, near, start, whole, until, C.block_k, MASKED)
        key = load_tile(k, n, keys, k_stride, C.block_k, C, MASKED)
        x = capped(tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=acc.dtype), C)
        if MASKED:
            seen = visible(i[:, None], n + tl.arange(0, C.block_k)[None, :], low, high, window, C)
            x = tl.where(seen, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, axis=1) * C.factor)
        base = higher
        if MASKED:  # a row that has seen nothing yet: 2^(-inf - 0) is 0, -inf - -inf would be NaN
            base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(x * C.factor - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, axis=1)
        value = load_tile(v, n, keys, v_stride, C.block_k, C, MASKED)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee", out_dtype=acc.dtype)
        peak = higher
    return acc, peak, total


@triton.jit(do_not_specialize=["queries", "keys", "window"])
def forward(
    q,  # (B, T, H, D)
    k,  # (B, S, Hkv, D)
    v,
    out,  # (B, T, H, D)
    lse,  # (B, H, T)
    plan,
    bounds,  # of the keys that exist
    q_strides,  # of batch, row, head; values of a head lie side by side
    k_strides,
    v_strides,
    out_strides,
    queries,
    keys,
    window,
    C: tl.constexpr,
):
    """out and the log-sum-exp of a tile of queries; a query that sees nothing has zeros and -inf."""
    head, b = tl.program_id(1), tl.program_id(2)
    row, own, key_row, others, tile = place(plan, queries, keys, C.causal)
    first = tile * C.block_q
    query = load_tile(head_base(q, q_strides, b, row, head), first, own, q_strides[1], C.block_q, C, True)
    key = head_base(k, k_strides, b, key_row, head // C.group)
    value = head_base(v, v_strides, b, key_row, head // C.group)
    low, high = existing(bounds, b, others)
    start, whole, until, stop = keys_of_tile(first, own, others, low, high, window, C)
    kind = lse.dtype.element_ty
    peak = tl.full((C.block_q,), float("-inf"), dtype=kind)
    total = tl.full((C.block_q,), 0.0, dtype=kind)
    acc = tl.full((C.block_q, C.d_side), 0.0, dtype=kind)
    position = first + others - own
    for masked in tl.static_range(1, -1, -1):
        acc, peak, total = walk_forward(
            acc, peak, total, query, key, value, k_strides[1], v_strides[1], position, others, low, high, window,
            start, whole, until, stop, C, masked,
        )  # fmt: skip
    divisor = tl.where(total == 0, 1.0, total)
    tile_out = acc / divisor[:, None]
    store_tile(head_base(out, out_strides, b, row, head), first, own, out_strides[1], tile_out, C.block_q, C)
    r = first + tl.arange(0, C.block_q)
    at = lse + (tl.cast(b, tl.int64) * tl.num_programs(1) + head) * queries + row + r
    tl.store(at, (peak + tl.log2(divisor)) * 0.6931471805599453, mask=r < own)  # ln 2
