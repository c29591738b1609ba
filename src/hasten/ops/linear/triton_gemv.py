"""Triton kernels of one row of x: every byte of the weight is read once, 16 bytes a thread, next to the previous 16.

No product is split over K among programs: a program has a few rows of the weight and all of K, its threads lie along K
and each keeps its own sums, which are added up at the end. The norm costs nothing: its factor of x is applied pair by
pair, and what all pairs share is applied to the sums. Importing this file imports Triton.
"""

import triton
import triton.language as tl

from hasten.ops.linear.triton_parts import (
    GATE_ROWS,
    ROWS,
    activate,
    finish,
    moments,
    normed_pair,
    root_mean_square,
    row_of_output,
)


@triton.jit
def one_plus(words, magic, NUMBER: tl.constexpr, BITS: tl.constexpr):
    """1 + q / 2^(23 - AT) in float32 for number q of a word, which moves to bit AT of the mantissa.

    AT is so chosen that one shift of the word serves two or three numbers.

    `magic` is 1.0's bits, an argument and no constant: a mask and a constant do not fit into one LOP3.
    """
    FROM: tl.constexpr = BITS * NUMBER
    AT: tl.constexpr = 11 + 4 * ((NUMBER + 1) % 3) if BITS == 4 else 15
    moved = words << (AT - FROM) if AT >= FROM else words >> (FROM - AT)
    return ((moved & (((1 << BITS) - 1) << AT)) | magic).to(tl.float32, bitcast=True)


@triton.jit
def fetch_to_cache(rows, bytes_of_row):
    """Ask for the first 16 KB of each row (of bytes; a pointer for each) in the L2 cache: before x is known."""
    lines = tl.minimum(tl.arange(0, 128)[None, :], (bytes_of_row - 1) // 128)
    places = rows.to(tl.pointer_type(tl.uint8))[:, None] + lines * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["groups"])
def one_row_packed(
    x,  # (K,), as integers of two numbers
    data,  # (N/4, words, 4) int32
    scales,  # (N/4, G, 4), or float32 (N,)
    zeros,  # as scales, or None: all are the middle
    bias,  # (N,)
    norm_weight,  # (K,), as integers of two numbers
    norm_bias,
    residual,  # (outputs,)
    out,  # (outputs,)
    outputs,
    n_size,
    k_size,
    row_stride,  # words of a row, 16 for a chunk
    groups,
    eps,
    offset,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # input features that share a scale; 0: a row
    XBITS: tl.constexpr,  # of a number of x: 16 or 32
    GBITS: tl.constexpr,  # of the norm's weight
    HALF: tl.constexpr,  # numbers of 16 bits are float16
    NORM: tl.constexpr,  # 0: none, 1: RMS, 2: layer norm
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,  # blocks of 4 rows
    T: tl.constexpr,  # words of a row in a step
    STAGES: tl.constexpr,  # steps whose loads are under way
    PDL: tl.constexpr,
):
    """int8 and int4. Σ (q - z)·x = Σ (1 + q·u)·(x/u) - Σ x/u - z·Σ x, u a power of two: nothing is converted."""
    PAIRS: tl.constexpr = 4 if BITS == 4 else 2  # of a word
    RUN: tl.constexpr = 32 * PAIRS  # features of a chunk
    MIDDLE: tl.constexpr = 8.0 if BITS == 4 else 128.0  # what stands for 0: int8 is stored with 128 added
    ZERO: tl.constexpr = 0.0 if BITS == 4 else 128.0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[None, None, :]
    t = tl.arange(0, T)[None, :, None]
    output = tl.program_id(0) * (BLOCK // 2) + i // 2 if GATED else tl.program_id(0) * BLOCK + i
    block = row_of_output(output, i % 2, GATED, GATE_ROWS // ROWS)
    block = tl.minimum(block, (n_size - 1) // ROWS)[:, None, None]
    words = data + block.to(tl.int64) * (row_stride * ROWS) + row
    group = block.to(tl.int64) * (groups * ROWS) + row
    last = row_stride - 1  # what is read beyond it is that word again, times zeros
    if PDL:
        fetch_to_cache(data + tl.reshape(block, (BLOCK,)).to(tl.int64) * (row_stride * ROWS), row_stride * 16)
        tl.extra.cuda.gdc_wait()
    mean, deviation = 0.0, 1.0
    if NORM == 2:
        mean, deviation = moments(x, k_size, eps, XBITS, HALF, 1024)
    sums = tl.zeros((BLOCK, T, ROWS), dtype=tl.float32)
    excess = tl.zeros((1, T, 1), dtype=tl.float32)
    squares = tl.zeros((1, T, 1), dtype=tl.float32)
    for start in tl.range(0, row_stride, T, num_stages=STAGES):
        at = start + t
        inside = tl.minimum(at, last)
        q = tl.load(words + inside * ROWS, eviction_policy="evict_first")
        place = at // 16 * (RUN // 2) + at % 16  # of the first pair in x
        left = k_size - 2 * place
        for pair in tl.static_range(PAIRS):
            low_x, high_x, own = normed_pair(
                *(x, norm_weight, norm_bias, place, 16 * pair, 32 * pair < left, mean, deviation, offset),
                *(XBITS, HALF, NORM, GBITS),
            )
            if NORM == 1:
                squares += own
            # A number's own unit goes to x: one is at bit BITS · pair of the word, the other 16 bits further.
            scaled_low = low_x * (1 << (12 - 4 * ((pair + 1) % 3) if BITS == 4 else 8))
            scaled_high = high_x * (1 << (12 - 4 * ((pair + 2) % 3) if BITS == 4 else 8))
            own_x = low_x + high_x
            extra = scaled_low + scaled_high + (MIDDLE if zeros is None else ZERO) * own_x
            if GROUP == 0:
                sums += one_plus(q, magic, pair, BITS) * scaled_low
                sums += one_plus(q, magic, pair + PAIRS, BITS) * scaled_high
                excess += extra
            else:
                if pair == 0 or GROUP == 32 or (GROUP == 64 and pair == 2):
                    # In two steps: the compiler makes the second a constant of the load.
                    own_group = group + inside // (16 * GROUP // RUN) * ROWS
                    if GROUP < RUN:
                        own_group = group + inside // 16 * (RUN // GROUP * ROWS)
                    scale = tl.load(scales + own_group + 32 * pair // GROUP * ROWS).to(tl.float32)
                    if zeros is not None:
                        zero = tl.load(zeros + own_group + 32 * pair // GROUP * ROWS).to(tl.float32)
                part = one_plus(q, magic, pair, BITS) * scaled_low - extra
                part += one_plus(q, magic, pair + PAIRS, BITS) * scaled_high
                if zeros is not None:
                    part -= zero * own_x
                sums += scale * part
    y = tl.sum(sums, axis=1) - tl.sum(tl.sum(excess, axis=2), axis=1)[:, None] if GROUP == 0 else tl.sum(sums, axis=1)
    if NORM == 1:
        y *= root_mean_square(tl.sum(squares), k_size, eps)
    n = tl.reshape(block, (BLOCK, 1)) * ROWS + tl.arange(0, ROWS)[None, :]
    if GROUP == 0:
        y *= tl.load(scales + n, mask=n < n_size, other=0.0)
    if bias is not None:
        y += tl.load(bias + n, mask=n < n_size, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK // 2, 2, ROWS)), (0, 2, 1)))
        output = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        places = output[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        finish(activate(gate, ACTIVATION) * up, residual, out, places, places < outputs, 0)
    else:
        places = (tl.program_id(0) * BLOCK + i)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        finish(y, residual, out, places, places < outputs, ACTIVATION)


@triton.jit
def one_row_plain(
    x,  # (K,), as integers of two numbers
    data,  # (N, K), as integers of two numbers of 16 bits
    bias,
    norm_weight,
    norm_bias,
    residual,
    out,
    outputs,
    n_size,
    k_size,
    row_stride,  # words of a row: K / 2
    eps,
    offset,
    XBITS: tl.constexpr,
    GBITS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,  # rows
    T: tl.constexpr,  # times 4 words of a row in a step
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights of 16 bits, row by row as PyTorch keeps them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    t = tl.arange(0, T)[None, :, None]
    word = tl.arange(0, 4)[None, None, :]
    output = tl.program_id(0) * (BLOCK // 2) + i // 2 if GATED else tl.program_id(0) * BLOCK + i
    n = row_of_output(output, i % 2, GATED, GATE_ROWS)
    words = data + tl.minimum(n, n_size - 1).to(tl.int64)[:, None, None] * row_stride + word
    last = row_stride // 4 - 1  # what is read beyond it is that again, times zeros
    if PDL:
        fetch_to_cache(data + tl.minimum(n, n_size - 1).to(tl.int64) * row_stride, row_stride * 4)
        tl.extra.cuda.gdc_wait()
    mean, deviation = 0.0, 1.0
    if NORM == 2:
        mean, deviation = moments(x, k_size, eps, XBITS, HALF, 1024)
    sums = tl.zeros((BLOCK, T), dtype=tl.float32)
    squares = tl.zeros((1, T), dtype=tl.float32)
    for start in tl.range(0, last + 1, T, num_stages=STAGES):
        at = start + t
        q = tl.load(words + tl.minimum(at, last) * 4, eviction_policy="evict_first")
        even, odd = tl.split(tl.reshape(q, (BLOCK, T, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        own = (first, second, third, fourth)
        place = (start + tl.arange(0, T)[None, :]) * 4
        for pair in tl.static_range(4):
            low_x, high_x, square = normed_pair(
                *(x, norm_weight, norm_bias, place, pair, place < row_stride, mean, deviation, offset),
                *(XBITS, HALF, NORM, GBITS),
            )
            if NORM == 1:
                squares += square
            if HALF:
                low = own[pair].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                high = (own[pair] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                low = (own[pair] << 16).to(tl.float32, bitcast=True)
                high = (own[pair] & -65536).to(tl.float32, bitcast=True)
            sums += low * low_x
            sums += high * high_x
    y = tl.sum(sums, axis=1)
    if NORM == 1:
        y *= root_mean_square(tl.sum(squares), k_size, eps)
    if bias is not None:
        y += tl.load(bias + n, mask=n < n_size, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
        places = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        finish(activate(gate, ACTIVATION) * up, residual, out, places, places < outputs, 0)
    else:
        finish(y, residual, out, n, n < outputs, ACTIVATION)
