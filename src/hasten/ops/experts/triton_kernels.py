"""Triton kernels of a layer's experts: their products for single rows and for tiles of rows, and what is around them.

Pair p is row p // k of x and the expert that it names at place p % k. Experts' weights are found through a table of
addresses (E, FIELDS): data, scales and zeros of gate, of up and of down. No program waits for another or for the host,
and grids depend on the number of rows alone: a step can be captured. Every pair's outputs are summed in the same order
whichever pairs are beside it. Importing this file imports Triton.
"""

# Tuples of tensors grow in Triton's unrolled loops.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

from hasten.ops.linear.triton_gemm import halves_of, numbers, unpack, waited_for
from hasten.ops.linear.triton_gemv import one_plus, sums_of_all, zeros_of
from hasten.ops.linear.triton_parts import ROWS, activate, load_pair

FIELDS = tl.constexpr(9)
DOWN = tl.constexpr(6)  # of these, the first of down; 0: of gate, 3: of up


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(
    chosen,  # (pairs,) int64
    order,  # (pairs,) int32: pairs by expert, and those of an expert by number
    tiles,  # (slots, 3) int32: an expert, and from where to where the order has its pairs of this tile
    pairs,
    M: tl.constexpr,  # pairs of a tile
    BLOCK: tl.constexpr,
):
    """A counting sort, in which each program counts for its own expert, and the tiles of the order.

    Expert e's tiles begin at slot first // M + e: there are always enough slots before those of e + 1, and slots that
    are left over have no pairs.
    """
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    own = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, pairs, BLOCK):
        found = tl.load(chosen + start + i, mask=start + i < pairs, other=1 << 30)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    first, count = tl.sum(before), tl.sum(own)
    place = first
    for start in range(0, pairs, BLOCK):
        mine = (tl.load(chosen + start + i, mask=start + i < pairs, other=1 << 30) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine) - 1, start + i, mask=mine == 1)
        place += tl.sum(mine)
    end = first + count
    for slot in range(first // M + expert, end // M + expert + 1):
        begin = tl.minimum(first + (slot - first // M - expert) * M, end)
        tl.store(tiles + 3 * slot, expert)
        tl.store(tiles + 3 * slot + 1, begin)
        tl.store(tiles + 3 * slot + 2, tl.minimum(begin + M, end))


@triton.jit
def plain_rows(
    x,  # (rows, K), or (pairs, K) behind gate and up
    addresses,
    chosen,  # (pairs,)
    out,  # (pairs, N)
    n_size,
    k_size,
    top,  # experts that a row takes
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,  # gate and up, else down
    BLOCK: tl.constexpr,  # rows of a weight
    T: tl.constexpr,  # features in a step
):
    """Products of one pair alone with BLOCK rows of its expert's weights in 16 bits, whose bytes are read once."""
    pair = tl.program_id(1)
    own = addresses + tl.load(chosen + pair) * FIELDS
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.minimum(n, n_size - 1).to(tl.int64)[:, None] * k_size
    weight = rows_of(own + (0 if GATED else DOWN), rows, x.dtype.element_ty)
    up = rows_of(own + 3, rows, x.dtype.element_ty) if GATED else weight
    own_x = x + (pair // top if GATED else pair).to(tl.int64) * k_size
    t = tl.arange(0, T)
    acc = tl.zeros((BLOCK, T), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK, T), dtype=tl.float32)
    for start in range(0, k_size, T):
        k = start + t
        part = tl.load(own_x + k, mask=k < k_size, other=0.0).to(tl.float32)[None, :]
        inside = (k < k_size)[None, :]
        w = tl.load(weight + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        if GATED:
            v = tl.load(up + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            acc_up += v.to(tl.float32) * part
        acc += w.to(tl.float32) * part
    y = tl.sum(acc, axis=1)
    if GATED:
        y = activate(y, ACTIVATION) * tl.sum(acc_up, axis=1)
    tl.store(out + pair.to(tl.int64) * n_size + n, y.to(out.dtype.element_ty), mask=n < n_size)


@triton.jit
def rows_of(field, rows, DTYPE: tl.constexpr):
    """Where rows of a plain weight begin."""
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(DTYPE)), 16) + rows


@triton.jit
def packed_rows(
    x,  # (rows, K) or (pairs, K), as integers of two numbers
    addresses,
    chosen,
    out,
    n_size,
    k_size,
    top,
    words,  # of a row of a weight
    groups,
    magic,  # the bits of 1.0
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # features that share a scale; 0: a row
    ZEROS: tl.constexpr,  # weights have zero points
    SCALES: tl.constexpr,  # their dtype
    XBITS: tl.constexpr,
    HALF: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,  # blocks of 4 rows; where gated, of gate and up in turns
    T: tl.constexpr,  # words of a row in a step
):
    """Products of one pair alone with int8 or int4, as `one_row_packed` (ops/linear/triton_gemv.py) computes them."""
    PAIRS: tl.constexpr = 4 if BITS == 4 else 2
    RUN: tl.constexpr = 32 * PAIRS  # features of a chunk
    SIDE: tl.constexpr = GROUP if GROUP > 0 and GROUP < RUN else RUN  # features whose sums have one scale
    MIDDLE: tl.constexpr = (0.0 if BITS == 4 else 128.0) if ZEROS else (8.0 if BITS == 4 else 128.0)
    pair = tl.program_id(1)
    own = addresses + tl.load(chosen + pair) * FIELDS
    lane = tl.arange(0, ROWS)[None, :]
    t = tl.arange(0, T)[:, None]
    data = ()
    scales = ()
    zeros = ()
    for b in tl.static_range(BLOCK):
        field = own + (3 * (b % 2) if GATED else DOWN)
        block = tl.program_id(0) * (BLOCK // 2) + b // 2 if GATED else tl.program_id(0) * BLOCK + b
        block = tl.minimum(block, (n_size - 1) // ROWS).to(tl.int64)
        matrix = tl.multiple_of(tl.load(field).to(tl.pointer_type(tl.int32)), 16)
        data = data + (matrix + block * (words * ROWS) + lane,)  # noqa: RUF005
        group_rows = block * (groups * ROWS) + lane
        scales = scales + (tl.load(field + 1).to(tl.pointer_type(SCALES)) + group_rows,)  # noqa: RUF005
        if ZEROS:
            kind = tl.pointer_type(tl.uint8 if BITS == 4 else tl.int8)
            zeros = zeros + (tl.load(field + 2).to(kind) + group_rows,)  # noqa: RUF005
    own_x = x + (pair // top if GATED else pair).to(tl.int64) * (k_size // 2)
    sums = zeros_of(BLOCK, T)
    excess = tl.zeros((T, 1), dtype=tl.float32)
    features = tl.zeros((T, 1), dtype=tl.float32)
    for start in range(0, words, T):
        at = start + t
        inside = tl.minimum(at, words - 1)  # what is read beyond the last one is that word again, times zeros
        q = ()
        for b in tl.static_range(BLOCK):
            q = q + (tl.load(data[b] + inside * ROWS, eviction_policy="evict_first"),)  # noqa: RUF005
        place = at // 16 * (RUN // 2) + at % 16  # of the first pair of features in x
        left = k_size - 2 * place
        parts = sums if GROUP == 0 else zeros_of(BLOCK, T)
        for j in tl.static_range(PAIRS):
            low, high = load_pair(own_x + place + 16 * j, 32 * j < left, XBITS, HALF)
            scaled_low = low * (1 << (12 - 4 * ((j + 1) % 3) if BITS == 4 else 8))
            scaled_high = high * (1 << (12 - 4 * ((j + 2) % 3) if BITS == 4 else 8))
            excess += scaled_low + scaled_high + MIDDLE * (low + high)
            features += low + high
            added = ()
            for b in tl.static_range(BLOCK):
                part = parts[b] + one_plus(q[b], magic, j, BITS) * scaled_low
                added = added + (part + one_plus(q[b], magic, j + PAIRS, BITS) * scaled_high,)  # noqa: RUF005
            parts = added
            if GROUP > 0 and (32 * j + 32) % SIDE == 0:  # the last features of a group, or of a chunk within one
                group = (inside // 16 * RUN + 32 * j) // GROUP * ROWS
                added = ()
                for b in tl.static_range(BLOCK):
                    part = parts[b] - excess
                    if ZEROS:
                        part -= tl.load(zeros[b] + group).to(tl.float32) * features
                    added = added + (sums[b] + tl.load(scales[b] + group).to(tl.float32) * part,)  # noqa: RUF005
                sums = added
                parts = zeros_of(BLOCK, T)
                excess, features = tl.zeros((T, 1), dtype=tl.float32), tl.zeros((T, 1), dtype=tl.float32)
        if GROUP == 0:
            sums = parts
    y = sums_of_all(sums, BLOCK, ROWS)  # (BLOCK, 4)
    if GROUP == 0:
        i = tl.arange(0, BLOCK)
        own_block = tl.program_id(0) * (BLOCK // 2) + i // 2 if GATED else tl.program_id(0) * BLOCK + i
        row = tl.minimum(own_block, (n_size - 1) // ROWS)[:, None] * ROWS + lane
        of_rows = tl.load(own + 1 + (3 * (i % 2) if GATED else DOWN + 0 * i)).to(tl.pointer_type(tl.float32))
        y = (y - tl.sum(excess)) * tl.load(of_rows[:, None] + row)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK // 2, 2, ROWS)), (0, 2, 1)))
        y = activate(gate, ACTIVATION) * up
    SIZE: tl.constexpr = (BLOCK // 2 if GATED else BLOCK) * ROWS
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    y = tl.reshape(y, (SIZE,)).to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64) * n_size + n, y, mask=n < n_size)


@triton.jit
def plain_product(
    field,
    x_rows,  # (1, M) where rows of x begin
    there,  # (M,) which exist
    first,  # row of the weight
    n_size,
    k_size,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,  # features in a step
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,  # K divides k_size
):
    """N rows of a weight in 16 bits times M rows of x: (N, M) float32."""
    rows = tl.minimum(first + tl.arange(0, N), n_size - 1).to(tl.int64)[:, None] * k_size
    weight = rows_of(field, rows, x_rows.dtype.element_ty)
    acc = tl.zeros((N, M), dtype=tl.float32)
    for start in tl.range(0, k_size, K, num_stages=STAGES):
        k = start + tl.arange(0, K)
        if WHOLE:
            w = tl.load(weight + k[None, :])
            part = tl.load(x_rows + k[:, None], mask=there[None, :], other=0.0)
        else:
            w = tl.load(weight + k[None, :], mask=(k < k_size)[None, :], other=0.0)
            part = tl.load(x_rows + k[:, None], mask=there[None, :] & (k < k_size)[:, None], other=0.0)
        acc = tl.dot(w, part, acc)
    return acc


@triton.jit
def packed_product(
    field,
    x_rows,
    there,
    first,
    n_size,
    k_size,
    words,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,  # k_size is one of whole chunks and groups
    WIDE: tl.constexpr,  # in the interpreter
):
    """`plain_product` of int8 or int4, unpacked in front of the tensor cores as in ops/linear/triton_gemm.py."""
    PAIRS: tl.constexpr = 4 if BITS == 4 else 2
    RUN: tl.constexpr = 32 * PAIRS  # features of a chunk
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    block = tl.minimum(first // ROWS + tl.arange(0, N // ROWS), (n_size - 1) // ROWS).to(tl.int64)
    data = tl.multiple_of(tl.load(field).to(tl.pointer_type(tl.int32)), 16)
    data += block[:, None, None] * (words * ROWS) + tl.arange(0, ROWS)[None, None, :]
    group_rows = block[:, None] * (groups * ROWS) + tl.arange(0, ROWS)[None, :]
    scales = tl.load(field + 1).to(tl.pointer_type(SCALES)) + group_rows  # (N / 4, 4)
    acc = tl.zeros((N, M), dtype=tl.float32)
    for step in tl.range(0, words // 16, num_stages=STAGES):
        q = tl.load(data + (step * 16 + tl.arange(0, 16))[None, :, None] * ROWS)  # (N / 4, 16, 4)
        q = tl.reshape(tl.permute(q, (0, 2, 1)), (N, 16))
        if not WIDE:
            pairs = unpack(q, BITS, tl.float16 == DTYPE)
        for i in tl.static_range(PAIRS):
            k = step * RUN + 32 * i + tl.arange(0, 32)
            mask = there[None, :] if WHOLE else there[None, :] & (k < k_size)[:, None]
            part = tl.load(x_rows + k[:, None], mask=mask, other=0.0)
            if WIDE:
                weight = numbers(q, i, BITS, N, 32)
                part = part.to(tl.float32)
            else:
                weight = halves_of(pairs[i], DTYPE, N, 32)
            if GROUP > 0:
                group = (step * RUN + 32 * i) // GROUP * ROWS
                if ZEROS:
                    kind = tl.pointer_type(tl.uint8 if BITS == 4 else tl.int8)
                    zero = tl.reshape(tl.load(tl.load(field + 2).to(kind) + group_rows + group), (N,)).to(tl.float32)
                    weight -= (zero - (8.0 if BITS == 4 else 0.0)).to(weight.dtype)[:, None]
                weight *= tl.reshape(tl.load(scales + group), (N,)).to(weight.dtype)[:, None]
            acc = tl.dot(weight, part, acc)
        if not WIDE:
            acc = waited_for(acc)
    if GROUP == 0:
        acc *= tl.reshape(tl.load(scales), (N,)).to(tl.float32)[:, None]
    return acc


@triton.jit
def product(
    field,
    x_rows,
    there,
    first,
    n_size,
    k_size,
    words,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """That of the weight's format."""
    if BITS == 16:
        return plain_product(field, x_rows, there, first, n_size, k_size, N, M, K, STAGES, WHOLE)
    else:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return packed_product(
            *(field, x_rows, there, first, n_size, k_size, words, groups),
            *(BITS, GROUP, ZEROS, SCALES, N, M, STAGES, WHOLE, WIDE),
        )


@triton.jit
def tiles_of_experts(
    x,  # (rows, K), or (pairs, K) in the order of the sort
    addresses,
    order,
    tiles,
    out,  # (pairs, N): of gate and up in that order, of down by the pairs' numbers
    n_size,
    k_size,
    top,
    words,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,  # gate and up, else down
    N: tl.constexpr,  # weight rows of a tile
    M: tl.constexpr,  # its pairs
    K: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Products of a tile of pairs, which all take one expert, with N rows of its weights."""
    tile = tiles + 3 * tl.program_id(1)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    if begin < end:
        own = addresses + tl.load(tile).to(tl.int64) * FIELDS
        place = begin + tl.arange(0, M)
        there = place < end
        pair = tl.load(order + place, mask=there, other=0)
        row = pair // top if GATED else place
        x_rows = x + row.to(tl.int64)[None, :] * k_size
        first = tl.program_id(0) * N
        y = product(
            *(own + (0 if GATED else DOWN), x_rows, there, first, n_size, k_size, words, groups),
            *(BITS, GROUP, ZEROS, SCALES, N, M, K, STAGES, WHOLE, WIDE),
        )
        if GATED:
            y = activate(y, ACTIVATION) * product(
                *(own + 3, x_rows, there, first, n_size, k_size, words, groups),
                *(BITS, GROUP, ZEROS, SCALES, N, M, K, STAGES, WHOLE, WIDE),
            )
        n = first + tl.arange(0, N)
        places = (place if GATED else pair).to(tl.int64)[None, :] * n_size + n[:, None]
        tl.store(out + places, y.to(out.dtype.element_ty), mask=there[None, :] & (n < n_size)[:, None])


@triton.jit
def add_shares(
    parts,  # (pairs, N)
    shares,  # (pairs,) float32
    out,  # (rows, N)
    n_size,
    TOP: tl.constexpr,  # experts that a row takes
    BLOCK: tl.constexpr,
):
    """Add a row's parts by their shares, in the order in which it names its experts."""
    pair = tl.program_id(0).to(tl.int64) * TOP
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(TOP):
        part = tl.load(parts + (pair + i) * n_size + n, mask=n < n_size, other=0.0).to(tl.float32)
        acc += part * tl.load(shares + pair + i)
    tl.store(out + tl.program_id(0).to(tl.int64) * n_size + n, acc.to(out.dtype.element_ty), mask=n < n_size)
