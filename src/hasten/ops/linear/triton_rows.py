"""Triton kernels beside a product of many rows that PyTorch computes: weights, the norm before it, what follows it."""

import triton
import triton.language as tl

from hasten.ops.linear.triton_parts import GATE_ROWS, ROWS, activate, finish, row_of_output


@triton.jit
def norm_row(
    x,  # (rows, K)
    weight,  # (K,)
    bias,
    out,  # (rows, K), or (rows, K') int8
    k_size,
    eps,
    offset,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # started while the kernel before it ends
    scales=None,  # float32 (rows,): the row is rounded to int8, its features in the order of chunks (layouts.py)
    out_size=0,  # K'
):
    """One row, RMS or layer norm (where there is a weight), in float32."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    place = tl.arange(0, BLOCK)
    # Byte b of word w of a chunk is feature 2w + b / 2, of the first 32 or, where b is odd, of the second.
    k = place if scales is None else place // 64 * 64 + place % 64 // 4 * 2 + place % 4 // 2 + place % 2 * 32
    inside = k < k_size
    row = tl.program_id(0).to(tl.int64) * k_size
    values = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        if CENTRED:
            values = tl.where(inside, values - tl.sum(values) / k_size, 0.0)
        values *= tl.rsqrt(tl.sum(values * values) / k_size + eps)
        values *= tl.load(weight + k, mask=inside, other=0.0).to(tl.float32) + offset
        if bias is not None:
            values += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    if scales is None:
        tl.store(out + row + k, values.to(out.dtype.element_ty), mask=inside)
    else:  # as the kernels for CPUs do (rows.h)
        bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # of the largest; NaN is above infinity
        top = bits.to(tl.float32, bitcast=True)
        finite = bits < 0x7F800000
        some = finite & (top > 1e-34)
        nearest = values * tl.where(some, 127.0 / top, 0.0) + 12582912.0 - 12582912.0  # 1.5 · 2^23: ties to even
        tl.store(out + tl.program_id(0).to(tl.int64) * out_size + place, nearest.to(tl.int8), mask=place < out_size)
        scale = tl.where(some, top / 127.0, tl.where(finite, 0.0, float("nan")))
        tl.store(scales + tl.program_id(0), scale)


@triton.jit
def activate_rows(
    y,  # (rows, N)
    out,  # (rows, outputs)
    outputs,
    n_size,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The activation of a product, or of its gate times its up, in a part of a row: its loads are of 16 bytes."""
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    row = y + tl.program_id(0).to(tl.int64) * n_size
    place = tl.program_id(0).to(tl.int64) * outputs + output
    first = tl.load(row + row_of_output(output, 0, GATED, GATE_ROWS), mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(row + row_of_output(output, 1, GATED, GATE_ROWS), mask=inside, other=0.0).to(tl.float32)
        finish(activate(first, ACTIVATION) * up, None, out, place, inside, 0)
    else:
        finish(first, None, out, place, inside, ACTIVATION)


@triton.jit
def dequantize_chunks(
    data,  # (N/4, words, 4) int32
    scales,  # (N/4, G, 4), or float32 (N,)
    zeros,  # as scales, or None: all are the middle
    out,  # (N, K)
    n_size,
    k_size,
    words,  # of a row
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # input features that share a scale; 0: a row
    BLOCKS: tl.constexpr,  # blocks of 4 rows
    CHUNKS: tl.constexpr,  # of 16 words of each row
):
    """A weight in the "chunks" layout (layouts.py) as 16-bit floats, rounded to them with their scales."""
    QUARTERS: tl.constexpr = 4 if BITS == 4 else 2  # of 32 features, in a chunk
    MIDDLE: tl.constexpr = 8 if BITS == 4 else 128
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None, None]
    word = tl.program_id(1) * CHUNKS * 16 + tl.arange(0, CHUNKS * 16)[None, :, None]
    row = tl.arange(0, ROWS)[None, None, :]
    n = block * ROWS + row
    there = (n < n_size) & (word < words)
    q = tl.load(data + (block.to(tl.int64) * words + word) * ROWS + row, mask=there, other=0)  # (BLOCKS, words, 4)
    first = word // 16 * (32 * QUARTERS) + word % 16 * 2  # of a word's features
    for quarter in tl.static_range(QUARTERS):
        k = first + 32 * quarter
        if GROUP == 0:  # noqa: SIM108 - the compiler must not see the other one
            place = n.to(tl.int64)
        else:
            place = (block.to(tl.int64) * groups + k // GROUP) * ROWS + row
        scale = tl.load(scales + place, mask=there, other=0.0).to(tl.float32)
        if zeros is None:
            zero = tl.full(scale.shape, MIDDLE, dtype=tl.float32)
        else:
            zero = tl.load(zeros + place, mask=there, other=0).to(tl.float32) + (MIDDLE if BITS == 8 else 0)
        low = ((q >> (BITS * quarter)) & ((1 << BITS) - 1)).to(tl.float32)
        high = ((q >> (16 + BITS * quarter)) & ((1 << BITS) - 1)).to(tl.float32)
        values = tl.join((low - zero) * scale, (high - zero) * scale)  # (BLOCKS, words, 4, 2): neighbours
        pair = tl.arange(0, 2)[None, None, None, :]
        at = (n.to(tl.int64) * k_size + k)[:, :, :, None] + pair
        inside = there[:, :, :, None] & ((k[:, :, :, None] + pair) < k_size)
        tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
