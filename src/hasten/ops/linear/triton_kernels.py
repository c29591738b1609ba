"""Triton kernels of the products with int8 and int4 weights in the "pieces" layout (layouts.py).

Weights are read once, 16 bytes a thread, neighbouring threads neighbouring bytes; a product with more outputs than the
device can be filled with is split over K as well, and the parts are added in a fixed order. zeros and bias may be None,
which the compiler knows. Importing this file imports Triton: only triton_linear.py does, and that only when the kernel
is bound.
"""

import triton
import triton.language as tl


@triton.jit
def nibbles(q, dtype: tl.constexpr):
    """128 + q in bfloat16, or 1024 + q in float16: q becomes the last bits of that number, and nothing is converted."""
    if dtype == tl.bfloat16:
        return (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return (q.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def dot(a, b, WIDE: tl.constexpr):
    """a·b in float32. WIDE: in the interpreter, which takes bfloat16's bits for integers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:  # noqa: RET505
        return tl.dot(a, b)


@triton.jit
def load_x(x, k, m, rows, k_size, ONE_ROW: tl.constexpr):
    """x (J,) in float32 for one row, else (J, M) in its own dtype; zeros beyond its size."""
    if ONE_ROW:
        return tl.load(x + k, mask=k < k_size, other=0.0).to(tl.float32)
    else:  # noqa: RET505
        mask = (k < k_size)[:, None] & (m < rows)[None, :]
        return tl.load(x + m[None, :] * k_size + k[:, None], mask=mask, other=0.0)


@triton.jit
def product(
    x,  # (rows, K) bfloat16 or float16
    data,  # (pieces, N, 16) bytes
    scales,  # (G, N)
    zeros,  # (G, N), or None: all are the middle
    bias,  # (N,)
    out,  # (splits, rows, N)
    rows,
    n_size,
    k_size,
    pieces,
    steps_per_split,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,  # a scale for each step; else one for each row
    ONE_ROW: tl.constexpr,
    M: tl.constexpr,  # rows, filled up to what a tensor core takes
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,  # bytes of a weight row in one step: those of a group
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of outputs over one part of K, in float32.

    Σ (q - z)·x = Σ (c + q)·x - (c + z)·Σ x over each group, with the c of `nibbles` (int8: 0): all terms but Σ x come
    from the tensor core, and the weights are never rounded. One row has no use for a tensor core: each thread keeps
    sums of its own bytes of each row, added up at the end.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, M)
    inside = n < n_size
    j = tl.arange(0, BLOCK_J)
    first = tl.program_id(1) * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(pieces, BLOCK_J // 16))
    acc = tl.zeros((BLOCK_N, BLOCK_J if ONE_ROW else M), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        piece = step * (BLOCK_J // 16) + j // 16
        places = piece.to(tl.int64)[None, :] * (n_size * 16) + (n[:, None] * 16 + (j % 16)[None, :])
        q = tl.load(data + places, mask=inside[:, None] & (piece < pieces)[None, :], other=0)  # (N, J)
        if zeros is not None:
            zero = tl.load(zeros + step * n_size + n, mask=inside, other=0).to(tl.float32)
        else:
            zero = tl.full((BLOCK_N,), 8.0 if BITS == 4 else 0.0, dtype=tl.float32)
        if BITS == 8:
            part_of_x = load_x(x, piece * 16 + j % 16, m, rows, k_size, ONE_ROW)
            if ONE_ROW:
                part = (q.to(tl.float32) - zero[:, None]) * part_of_x[None, :]
            else:  # through float32, because the interpreter knows no way from integers to bfloat16
                part = dot(q.to(tl.float32).to(x.dtype.element_ty), part_of_x, WIDE)
                if zeros is not None:
                    part -= zero[:, None] * tl.sum(part_of_x.to(tl.float32), axis=0)[None, :]
        else:
            low_x = load_x(x, piece * 32 + j % 16, m, rows, k_size, ONE_ROW)
            high_x = load_x(x, piece * 32 + 16 + j % 16, m, rows, k_size, ONE_ROW)
            if ONE_ROW:
                low = nibbles(q & 15, tl.bfloat16).to(tl.float32) - (128.0 + zero)[:, None]
                high = nibbles(q >> 4, tl.bfloat16).to(tl.float32) - (128.0 + zero)[:, None]
                part = low * low_x[None, :] + high * high_x[None, :]
            else:
                offset = (128.0 if x.dtype.element_ty == tl.bfloat16 else 1024.0) + zero
                sums = tl.sum(low_x.to(tl.float32), axis=0) + tl.sum(high_x.to(tl.float32), axis=0)  # (M,)
                part = dot(nibbles(q & 15, x.dtype.element_ty), low_x, WIDE)
                part += dot(nibbles(q >> 4, x.dtype.element_ty), high_x, WIDE)
                part -= offset[:, None] * sums[None, :]
        if GROUPED:
            part *= tl.load(scales + step * n_size + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc += part
    if ONE_ROW:
        acc = tl.sum(acc, axis=1)[:, None]
    if not GROUPED:
        acc *= tl.load(scales + n, mask=inside, other=0.0)[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    places = (tl.program_id(1) * rows + m)[None, :] * n_size + n[:, None]
    mask = inside[:, None] & (m < rows)[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_splits(
    parts,  # (SPLITS, rows, N) float32
    bias,
    out,  # (rows, N)
    size,  # rows · N
    n_size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the parts, first to last, whatever order they were computed in."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.load(parts + i, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + i, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + i % n_size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize(
    data,
    scales,
    zeros,
    out,  # (N, K)
    n_size,
    k_size,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """The weight in a 16-bit dtype, rounded to it; where a row has one scale, exact and without it."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    piece = tl.program_id(1) * (BLOCK_J // 16) + j // 16
    k = piece * (16 if BITS == 8 else 32) + j % 16
    inside = n < n_size
    mask = inside[:, None] & (k < k_size)[None, :]
    places = piece.to(tl.int64)[None, :] * (n_size * 16) + (n[:, None] * 16 + (j % 16)[None, :])
    q = tl.load(data + places, mask=mask, other=0)
    to = out + n.to(tl.int64)[:, None] * k_size + k[None, :]
    if not GROUPED:
        tl.store(to, q.to(tl.float32).to(out.dtype.element_ty), mask=mask)
    else:
        group = tl.program_id(1)
        scale = tl.load(scales + group * n_size + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if zeros is not None:
            zero = tl.load(zeros + group * n_size + n, mask=inside, other=0).to(tl.float32)[:, None]
        else:
            zero = tl.full((BLOCK_N, 1), 8.0 if BITS == 4 else 0.0, dtype=tl.float32)
        if BITS == 8:
            tl.store(to, ((q.to(tl.float32) - zero) * scale).to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(to, (((q & 15).to(tl.float32) - zero) * scale).to(out.dtype.element_ty), mask=mask)
            high = inside[:, None] & (k + 16 < k_size)[None, :]
            tl.store(to + 16, (((q >> 4).to(tl.float32) - zero) * scale).to(out.dtype.element_ty), mask=high)
