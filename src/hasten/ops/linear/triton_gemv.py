"""Triton kernels of one row of x: every byte of the weight is read once, 16 bytes a thread, next to the previous 16.

No product is split over K among programs: a program has a few rows of the weight and all of K, its threads lie along K
and each keeps its own sums, which are added up at the end. The norm costs nothing: its factor of x is applied pair by
pair, and what all pairs share is applied to the sums. Importing this file imports Triton.
"""

# Tuples of tensors grow in Triton's unrolled loops.
# mypy: disable-error-code="assignment, var-annotated"

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
def joined(sums, BLOCK: tl.constexpr):
    """BLOCK tensors as one, with an axis more for each bit of their number, the lowest first."""
    if BLOCK == 2:
        return tl.join(sums[0], sums[1])
    elif BLOCK == 4:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
    else:
        tl.static_assert(BLOCK == 8, "a program has 1, 2, 4 or 8 blocks")
        low = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
        high = tl.join(tl.join(sums[4], sums[5]), tl.join(sums[6], sums[7]))
        return tl.join(low, high)


@triton.jit
def sums_of_all(sums, BLOCK: tl.constexpr, OWN: tl.constexpr):
    """The sums of BLOCK tensors (T,) or (T, OWN) over T: (BLOCK,) or (BLOCK, OWN)."""
    if BLOCK == 1:
        y = tl.sum(tl.expand_dims(sums[0], 0), axis=1)
    else:
        y = tl.sum(joined(sums, BLOCK), axis=0)
        if BLOCK == 2:
            y = tl.trans(tl.reshape(y, (OWN, 2)))
        elif BLOCK == 4:
            y = tl.reshape(tl.permute(tl.reshape(y, (OWN, 2, 2)), (2, 1, 0)), (BLOCK, OWN))
        else:
            y = tl.reshape(tl.permute(tl.reshape(y, (OWN, 2, 2, 2)), (3, 2, 1, 0)), (BLOCK, OWN))
    return tl.reshape(y, (BLOCK,)) if OWN == 1 else y


@triton.jit
def halves(word, HALF: tl.constexpr):
    """The two 16-bit floats of a word, in float32."""
    if HALF:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def zeros_of(BLOCK: tl.constexpr, T: tl.constexpr):
    """BLOCK tensors (T, 4)."""
    sums = ()
    for _ in tl.static_range(BLOCK):
        sums = sums + (tl.zeros((T, ROWS), dtype=tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def block_of(program, i, n_size, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """The i-th block of 4 weight rows of a program."""
    output = program * (BLOCK // 2) + i // 2 if GATED else program * BLOCK + i
    return tl.minimum(row_of_output(output, i % 2, GATED, GATE_ROWS // ROWS), (n_size - 1) // ROWS)


@triton.jit
def words_of(data, at, mask, row_stride, n_size, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """The words `at` (T, 1) of each of a program's blocks: BLOCK tensors (T, 4)."""
    row = tl.arange(0, ROWS)[None, :]
    q = ()
    for b in tl.static_range(BLOCK):
        own_block = block_of(tl.program_id(0), b, n_size, GATED, BLOCK)
        words = data + own_block.to(tl.int64) * (row_stride * ROWS) + row
        q = q + (tl.load(words + at * ROWS, mask=mask, eviction_policy="evict_first"),)  # noqa: RUF005
    return q


@triton.jit
def of_groups(
    values,  # scales or zeros: (N/4, G, 4)
    at,
    row_stride,
    groups,
    n_size,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # groups of a chunk
    SHARED: tl.constexpr,  # chunks of a group
):
    """Those of the groups of the words `at` (T, 1): PARTS tensors (T, 4) for each of a program's blocks."""
    row = tl.arange(0, ROWS)[None, :]
    found = ()
    for b in tl.static_range(BLOCK):
        own_block = block_of(tl.program_id(0), b, n_size, GATED, BLOCK)
        # In two steps: the compiler makes the second a constant of the load.
        group = own_block.to(tl.int64) * (groups * ROWS) + row + at // (16 * SHARED) * (PARTS * ROWS)
        for part in tl.static_range(PARTS):
            found = found + (tl.load(values + group + part * ROWS, mask=at < row_stride, other=0),)  # noqa: RUF005
    return found


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
    T: tl.constexpr,  # words of a row in a step: one for each thread
    STAGES: tl.constexpr,  # steps whose loads are under way
    EARLY: tl.constexpr,  # started while the kernel before it ends; words are loaded a step ahead
):
    """int8 and int4. Σ (q - z)·x = Σ (1 + q·u)·(x/u) - Σ x/u - z·Σ x, u a power of two: nothing is converted."""
    PAIRS: tl.constexpr = 4 if BITS == 4 else 2  # of a word
    RUN: tl.constexpr = 32 * PAIRS  # features of a chunk
    MIDDLE: tl.constexpr = 8.0 if BITS == 4 else 128.0  # the zero point; int8 is stored with 128 added
    ZERO: tl.constexpr = 0.0 if BITS == 4 else 128.0
    PARTS: tl.constexpr = 0 if GROUP == 0 else RUN // GROUP if GROUP < RUN else 1
    SHARED: tl.constexpr = GROUP // RUN if GROUP > RUN else 1
    i = tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[None, :]
    t = tl.arange(0, T)[:, None]
    output = tl.program_id(0) * (BLOCK // 2) + i // 2 if GATED else tl.program_id(0) * BLOCK + i
    block = tl.minimum(row_of_output(output, i % 2, GATED, GATE_ROWS // ROWS), (n_size - 1) // ROWS)
    last = row_stride - 1  # what is read beyond it is that word again, times zeros
    following = ()
    if EARLY:
        following = words_of(data, t, t <= last, row_stride, n_size, GATED, BLOCK)
        tl.extra.cuda.gdc_wait()
    mean, deviation = 0.0, 1.0
    if NORM == 2:
        mean, deviation = moments(x, k_size, eps, XBITS, HALF, 1024)
    # Blocks are tuples, not an axis: so that the compiler lays all threads along K, and x needs no exchange.
    sums = zeros_of(BLOCK, T)
    excess = tl.zeros((T, 1), dtype=tl.float32)
    features = tl.zeros((T, 1), dtype=tl.float32)
    squares = tl.zeros((T, 1), dtype=tl.float32)
    for start in tl.range(0, row_stride, T, num_stages=STAGES):
        at = start + t
        inside = tl.minimum(at, last)
        if EARLY:
            if start + T > last:  # all is under way: what comes behind may take the room of the programs that end
                tl.extra.cuda.gdc_launch_dependents()
            q = following
            following = words_of(data, at + T, at + T <= last, row_stride, n_size, GATED, BLOCK)
            if GROUP > 0:  # all at once: one by one, where each is used, they make every step wait
                group_scales = of_groups(scales, at, row_stride, groups, n_size, GATED, BLOCK, PARTS, SHARED)
                if zeros is not None:
                    group_zeros = of_groups(zeros, at, row_stride, groups, n_size, GATED, BLOCK, PARTS, SHARED)
        else:
            q = words_of(data, inside, None, row_stride, n_size, GATED, BLOCK)
        place = at // 16 * (RUN // 2) + at % 16  # of the first pair in x
        left = k_size - 2 * place
        parts = sums if GROUP == 0 else zeros_of(BLOCK, T)
        if GROUP > 0:
            excess, features = tl.zeros((T, 1), dtype=tl.float32), tl.zeros((T, 1), dtype=tl.float32)
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
            excess += scaled_low + scaled_high + (MIDDLE if zeros is None else ZERO) * (low_x + high_x)
            if zeros is not None:
                features += low_x + high_x
            added = ()
            for b in tl.static_range(BLOCK):
                part = (-excess if GROUP == 32 else parts[b]) + one_plus(q[b], magic, pair, BITS) * scaled_low
                added = added + (part + one_plus(q[b], magic, pair + PAIRS, BITS) * scaled_high,)  # noqa: RUF005
            parts = added
            if GROUP > 0 and (32 * pair + 32) % (GROUP if GROUP < RUN else RUN) == 0:  # the last pair of a group
                added = ()
                for b in tl.static_range(BLOCK):
                    part = parts[b] if GROUP == 32 else parts[b] - excess
                    if EARLY:
                        scale = group_scales[b * PARTS + 32 * pair // GROUP].to(tl.float32)
                        if zeros is not None:
                            part -= group_zeros[b * PARTS + 32 * pair // GROUP].to(tl.float32) * features
                    else:
                        group = block_of(tl.program_id(0), b, n_size, GATED, BLOCK).to(tl.int64) * (groups * ROWS) + row
                        # In two steps: the compiler makes the second a constant of the load.
                        if GROUP < RUN:
                            group = group + inside // 16 * (RUN // GROUP * ROWS)
                        else:
                            group = group + inside // (16 * GROUP // RUN) * ROWS
                        scale = tl.load(scales + group + 32 * pair // GROUP * ROWS).to(tl.float32)
                        if zeros is not None:
                            part -= tl.load(zeros + group + 32 * pair // GROUP * ROWS).to(tl.float32) * features
                    added = added + (sums[b] + scale * part,)  # noqa: RUF005
                sums = added
                parts = zeros_of(BLOCK, T)
                excess, features = tl.zeros((T, 1), dtype=tl.float32), tl.zeros((T, 1), dtype=tl.float32)
        if GROUP == 0:
            sums = parts
    y = sums_of_all(sums, BLOCK, ROWS)
    if GROUP == 0:
        y -= tl.sum(excess)
    if NORM == 1:
        y *= root_mean_square(tl.sum(squares), k_size, eps)
    block = block[:, None]
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
def plain_words_of(data, at, last, row_stride, n_size, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """16 bytes `at` (T,) of each of a program's rows: BLOCK tensors (T, 4)."""
    word = tl.arange(0, 4)[None, :]
    q = ()
    for b in tl.static_range(BLOCK):
        output = tl.program_id(0) * (BLOCK // 2) + b // 2 if GATED else tl.program_id(0) * BLOCK + b
        row = tl.minimum(row_of_output(output, b % 2, GATED, GATE_ROWS), n_size - 1)
        words = data + row.to(tl.int64) * row_stride + word
        q = q + (tl.load(words + tl.minimum(at, last)[:, None] * 4, eviction_policy="evict_first"),)  # noqa: RUF005
    return q


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
    T: tl.constexpr,  # times 4 words of a row in a step: 4 for each thread
    EARLY: tl.constexpr,  # started while the kernel before it ends
):
    """Weights of 16 bits, row by row as PyTorch keeps them; a step's are loaded while those before are multiplied."""
    i = tl.arange(0, BLOCK)
    t = tl.arange(0, T)
    n = row_of_output(
        tl.program_id(0) * (BLOCK // 2) + i // 2 if GATED else tl.program_id(0) * BLOCK + i, i % 2, GATED, GATE_ROWS
    )
    last = row_stride // 4 - 1  # what is read beyond it is that again, times zeros
    following = plain_words_of(data, t, last, row_stride, n_size, GATED, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    mean, deviation = 0.0, 1.0
    if NORM == 2:
        mean, deviation = moments(x, k_size, eps, XBITS, HALF, 1024)
    sums = ()
    for _ in tl.static_range(BLOCK):
        sums = sums + (tl.zeros((T,), dtype=tl.float32),)  # noqa: RUF005
    squares = tl.zeros((T,), dtype=tl.float32)
    for start in tl.range(0, last + 1, T, num_stages=1):
        at = start + t
        q = following
        following = plain_words_of(data, at + T, last, row_stride, n_size, GATED, BLOCK)
        own = ()
        for b in tl.static_range(BLOCK):
            even, odd = tl.split(tl.reshape(q[b], (T, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            own = own + (first, second, third, fourth)  # noqa: RUF005
        for pair in tl.static_range(4):
            low_x, high_x, square = normed_pair(
                *(x, norm_weight, norm_bias, at * 4, pair, at <= last, mean, deviation, offset),
                *(XBITS, HALF, NORM, GBITS),
            )
            if NORM == 1:
                squares += square
            added = ()
            for b in tl.static_range(BLOCK):
                low, high = halves(own[4 * b + pair], HALF)
                added = added + (sums[b] + low * low_x + high * high_x,)  # noqa: RUF005
            sums = added
    if EARLY:  # what comes behind may take the room of the programs that end
        tl.extra.cuda.gdc_launch_dependents()
    y = sums_of_all(sums, BLOCK, 1)
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
