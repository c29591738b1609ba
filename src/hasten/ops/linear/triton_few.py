"""A Triton kernel of few rows of x: packed weights go from global memory to registers as `mma.sync` wants them.

A warp has 32 rows of the weight (8 blocks of the "chunks" layout) and takes chunks of them in turns with other warps of
its program, which add their sums up at the end. Nothing goes through shared memory before that, and warps do not wait
for each other. Lane 4g + t has block g: its words 4t to 4t + 3 of a chunk, 16 bytes each, and the same features of row
g of x, 8 (16 bytes) of each quarter. So a tensor (threads, 4) is four registers of each thread, and `tensor_cores`
multiplies a quarter: 32 features of 32 weight rows with 8 rows of x.

The interpreter knows no assembly: there (WIDE) the same registers are multiplied as the matrices that they make up.
Importing this file imports Triton.
"""

# Tuples of tensors grow in Triton's unrolled loops.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

from hasten.ops.linear.triton_gemv import halves
from hasten.ops.linear.triton_parts import ROWS, activate, finish

# Weights, x and sums are four registers each: two sums of four weight rows, one for each of two rows of x.
PRODUCTS = """{
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {$0,$4,$1,$5}, {$8,$9,$12,$13}, {$24,$25}, {$28,$32,$29,$33};
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {$2,$6,$3,$7}, {$10,$11,$14,$15}, {$24,$25}, {$30,$34,$31,$35};
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {$0,$4,$1,$5}, {$16,$17,$20,$21}, {$26,$27}, {$0,$4,$1,$5};
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {$2,$6,$3,$7}, {$18,$19,$22,$23}, {$26,$27}, {$2,$6,$3,$7};
}"""
PRODUCTS_BF16 = tl.constexpr(PRODUCTS.replace("TYPE", "bf16"))
PRODUCTS_FP16 = tl.constexpr(PRODUCTS.replace("TYPE", "f16"))
REGISTERS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 20 + ["f"] * 8))
# Two numbers of 4 bits, 16 bits apart, in the mantissas of 128 or 1024, minus the same with the zero point.
INT4_BF16 = tl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 $0, $0, $2;")
INT4_FP16 = tl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 $0, $0, $2;")
INT8_FP16 = tl.constexpr("lop3.b32 $0, $1, 0x00FF00FF, 0x64006400, 0xEA; sub.rn.f16x2 $0, $0, $2;")
# bfloat16 has 7 bits of mantissa: 128 + the last 7 bits, minus 256, or 128 where the eighth is set.
INT8_BF16 = tl.constexpr(
    """{
    .reg .b32 high;
    lop3.b32 high, $1, 0x00800080, 0x43004300, 0xAE;
    lop3.b32 $0, $1, 0x007F007F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, $0, high;
    }"""
)


@triton.jit
def tensor_cores(first, second, third, fourth, x, even, odd, HALF: tl.constexpr, WIDE: tl.constexpr):
    """Add the products of 4 words' weights with x (threads, 4) to the sums of even and odd rows of x (threads, 4)."""
    if WIDE:
        return products_of_matrices(first, second, third, fourth, x, even, odd, HALF)
    else:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return tl.inline_asm_elementwise(
            PRODUCTS_FP16 if HALF else PRODUCTS_BF16,
            REGISTERS,
            [first, second, third, fourth, x, even, odd],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )


@triton.jit
def products_of_matrices(first, second, third, fourth, x, even, odd, HALF: tl.constexpr):
    """What `tensor_cores` computes, for the interpreter."""
    T: tl.constexpr = first.shape[0]
    low, high = halves(tl.join(tl.join(first, second), tl.join(third, fourth)), HALF)  # (T, rows, words % 2, words / 2)
    both = tl.reshape(
        tl.permute(tl.join(low, high), (0, 1, 3, 2, 4)), (T // 32, 8, 4, 4, 8)
    )  # warp, g, t, row, feature
    weights = tl.reshape(tl.permute(both, (0, 1, 3, 2, 4)), (T // 32, 32, 32, 1))
    low, high = halves(x, HALF)
    features = tl.permute(tl.reshape(tl.join(low, high), (T // 32, 8, 32)), (0, 2, 1))  # warp, feature, row of x
    y = tl.sum(weights * tl.reshape(features, (T // 32, 1, 32, 8)), axis=2)  # warp, row of the weight, row of x
    y = tl.permute(tl.reshape(y, (T // 32, 8, 4, 4, 2)), (0, 1, 3, 2, 4))
    added_even, added_odd = tl.split(tl.reshape(y, (T, 4, 2)))
    return even + added_even, odd + added_odd


@triton.jit
def pairs_of(words, zeros, QUARTER: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr):
    """Each word's two numbers of a quarter minus their zero (None: the middle), exactly, in words of 16-bit floats."""
    moved = words >> (BITS * QUARTER)
    ADDED: tl.constexpr = 128 if BITS == 8 else 0  # to a number as it is stored
    if WIDE:
        if zeros is None:
            zero = tl.full(words.shape, 8 if BITS == 4 else 128, dtype=tl.int32)
        else:
            zero = zeros.to(tl.int32) + ADDED
        low, high = moved & ((1 << BITS) - 1), (moved >> 16) & ((1 << BITS) - 1)
        return word_of((low - zero).to(tl.float32), (high - zero).to(tl.float32), HALF)
    elif BITS == 8 and not HALF:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        pairs = tl.inline_asm_elementwise(INT8_BF16, "=&r,r", [moved], dtype=tl.int32, is_pure=True, pack=1)
        if zeros is not None:
            zero = word_of(zeros.to(tl.float32), zeros.to(tl.float32), HALF)
            pairs = tl.inline_asm_elementwise(
                "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, zero], dtype=tl.int32, is_pure=True, pack=1
            )
        return pairs
    else:
        ONE: tl.constexpr = 0x64006400 if HALF else 0x43004300  # 1024 or 128, twice
        if zeros is None:
            zero = tl.full(words.shape, ONE + (0x00080008 if BITS == 4 else 0x00800080), dtype=tl.int32)
        else:
            zero = (zeros.to(tl.int32) + ADDED) * 0x00010001 + ONE
        code: tl.constexpr = (INT4_FP16 if HALF else INT4_BF16) if BITS == 4 else INT8_FP16
        return tl.inline_asm_elementwise(code, "=&r,r,r", [moved, zero], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def word_of(low, high, HALF: tl.constexpr):
    """Two float32 as 16-bit floats in a word, where these can hold them."""
    if HALF:
        low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:  # noqa: RET505
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def fetch(
    words,
    scales,
    zeros,
    group_row,
    chunk,
    chunks,
    turn,  # of a thread's four words: its i-th load is word i ^ turn
    PARTS: tl.constexpr,  # groups of a chunk; 0: a row has one scale
    SHARED: tl.constexpr,  # chunks of a group
):
    """A chunk's 4 words of each thread, then the scales and zeros of its groups; each (threads, 4)."""
    row = tl.arange(0, ROWS)[None, :]
    mask = chunk < chunks
    own = words + chunk * (16 * ROWS)
    fetched = ()
    for i in tl.static_range(4):
        word = tl.load(own + (i ^ turn) * ROWS + row, mask=mask, eviction_policy="evict_first")
        fetched = fetched + (word,)  # noqa: RUF005
    if PARTS > 0:
        group = group_row + (chunk // SHARED * PARTS) * ROWS + row
        for part in tl.static_range(PARTS):
            fetched = fetched + (tl.load(scales + group + part * ROWS, mask=mask, other=0.0),)  # noqa: RUF005
        if zeros is not None:
            for part in tl.static_range(PARTS):
                fetched = fetched + (tl.load(zeros + group + part * ROWS, mask=mask, other=0),)  # noqa: RUF005
    return fetched


@triton.jit
def nothing(COUNT: tl.constexpr, T: tl.constexpr):
    """COUNT tensors (T, 4) of zeros."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((T, ROWS), dtype=tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def swapped(first, second, where):
    """Both, the other way round in some threads."""
    return tl.where(where, second, first), tl.where(where, first, second)


@triton.jit
def add_chunk(
    sums,
    fetched,
    turn,
    x_rows,
    place,  # of a thread's four pairs of the chunk's first quarter, in a row of x
    k_pairs,
    T: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    ASYMMETRIC: tl.constexpr,  # there are zeros
    WIDE: tl.constexpr,
):
    """Add a chunk's products. A group's are added up alone, then multiplied by its scale."""
    QUARTERS: tl.constexpr = 4 if BITS == 4 else 2
    SHARE: tl.constexpr = QUARTERS // PARTS if PARTS > 0 else QUARTERS  # quarters of one scale
    turned, crossed = turn % 2 == 1, turn >= 2
    first, second = swapped(fetched[0], fetched[1], turned)
    third, fourth = swapped(fetched[2], fetched[3], turned)
    first, third = swapped(first, third, crossed)
    second, fourth = swapped(second, fourth, crossed)
    parts = nothing(2 * TILES, T) if PARTS > 0 else sums
    x = ()
    for quarter in tl.static_range(QUARTERS):
        if quarter % 2 == 0:  # this one's and the next one's: half of the threads read the latter first
            at = place + 16 * quarter + turn // 2 * 16
            next_at = place + 16 * quarter + 16 - turn // 2 * 16
            x = ()
            for tile in tl.static_range(TILES):
                own = tl.load(x_rows[tile] + at, mask=at < k_pairs, other=0)
                next_own = tl.load(x_rows[tile] + next_at, mask=next_at < k_pairs, other=0)
                x = x + swapped(own, next_own, crossed)
        zero = fetched[4 + PARTS + quarter // SHARE] if ASYMMETRIC else None
        a = pairs_of(first, zero, quarter, BITS, HALF, WIDE)
        b = pairs_of(second, zero, quarter, BITS, HALF, WIDE)
        c = pairs_of(third, zero, quarter, BITS, HALF, WIDE)
        d = pairs_of(fourth, zero, quarter, BITS, HALF, WIDE)
        added = ()
        for tile in tl.static_range(TILES):
            even, odd = parts[2 * tile], parts[2 * tile + 1]
            added = added + tensor_cores(a, b, c, d, x[2 * tile + quarter % 2], even, odd, HALF, WIDE)
        parts = added
        if PARTS > 0 and quarter % SHARE == SHARE - 1:
            scale = fetched[4 + quarter // SHARE].to(tl.float32)
            added = ()
            for i in tl.static_range(2 * TILES):
                added = added + (sums[i] + scale * parts[i],)  # noqa: RUF005
            sums = added
            parts = nothing(2 * TILES, T)
    return sums if PARTS > 0 else parts


@triton.jit
def one_of_tiles(sums, ODD: tl.constexpr, TILES: tl.constexpr):
    """The sums of even or of odd rows of x, of all tiles: (threads, 4, TILES), of a single tile (threads, 4)."""
    if TILES == 1:
        return sums[ODD]
    elif TILES == 2:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return tl.join(sums[ODD], sums[2 + ODD])
    else:
        tl.static_assert(TILES == 4, "a program has 1, 2 or 4 tiles")
        low, high = tl.join(sums[ODD], sums[4 + ODD]), tl.join(sums[2 + ODD], sums[6 + ODD])
        return tl.reshape(tl.join(low, high), (low.shape[0], ROWS, 4))


@triton.jit
def sum_of_warps(sums, WARPS: tl.constexpr):
    """Sums (warps, own) over the warps. The compiler's own way through shared memory has all lanes in one bank.

    A split makes the numbers of two warps neighbours in a thread, and those of the others neighbours in a warp.
    """
    low, high = tl.split(tl.reshape(tl.trans(sums), (sums.shape[1], WARPS // 2, 2)))
    return tl.sum(low + high, axis=1)


@triton.jit(do_not_specialize=["rows", "groups", "chunks"])
def few_rows(
    x,  # (rows, K) in 16 bits, as integers of two numbers
    data,  # (N/4, words, 4) int32
    scales,  # (N/4, G, 4), or float32 (N,)
    zeros,  # as scales, or None: all are the middle
    bias,  # (N,)
    residual,  # (rows, outputs)
    out,  # (rows, outputs)
    rows,
    outputs,
    n_size,
    k_pairs,  # K / 2
    row_stride,  # words of a row
    groups,
    chunks,  # of 16 words of a row
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # input features that share a scale; 0: a row
    HALF: tl.constexpr,  # x is float16
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TILES: tl.constexpr,  # of 8 rows of x
    AHEAD: tl.constexpr,  # chunks of a warp that are under way
    WARPS: tl.constexpr,  # of a program along K
    SIDE: tl.constexpr,  # as many again with the next 32 weight rows, which find x in the L1 cache; 2 where gated
    WIDE: tl.constexpr,  # in the interpreter
    EARLY: tl.constexpr,  # started while the kernel before it ends
):
    """32 · SIDE rows of the weight over all of K."""
    RUN: tl.constexpr = 128 if BITS == 4 else 64  # features of a chunk
    PARTS: tl.constexpr = 0 if GROUP == 0 else RUN // GROUP if GROUP < RUN else 1
    SHARED: tl.constexpr = GROUP // RUN if GROUP > RUN else 1
    T: tl.constexpr = 32 * WARPS * SIDE
    thread = tl.arange(0, T)[:, None]
    warp, g = thread // (32 * SIDE), thread % 32 // 4
    block = (tl.program_id(0) * SIDE + thread // 32 % SIDE) * 8 + g
    block = tl.minimum(block, (n_size - 1) // ROWS).to(tl.int64)
    word = thread % 4 * 4  # the first
    # Eight threads read from eight banks of the L1 cache at once.
    turn = thread % 4 // 2 + g % 2 * 2
    words = data + block * (row_stride * ROWS) + word * ROWS
    group_row = block * (groups * ROWS)
    q = ()
    for i in tl.static_range(AHEAD):
        q = q + (fetch(words, scales, zeros, group_row, i * WARPS + warp, chunks, turn, PARTS, SHARED),)  # noqa: RUF005
    if EARLY:
        tl.extra.cuda.gdc_wait()
    first_row = tl.program_id(1) * (8 * TILES)
    x_rows = ()
    for tile in tl.static_range(TILES):
        x_rows = x_rows + (x + tl.minimum(first_row + 8 * tile + g, rows - 1) * k_pairs,)  # noqa: RUF005
    pair = word + tl.arange(0, ROWS)[None, :]
    sums = nothing(2 * TILES, T)
    for first in tl.range(0, chunks, AHEAD * WARPS, num_stages=1):
        if EARLY:  # noqa: SIM102 - known to the compiler
            if first + AHEAD * WARPS >= chunks:  # all is under way: what comes behind may take the room of what ends
                tl.extra.cuda.gdc_launch_dependents()
        coming = ()
        for i in tl.static_range(AHEAD):
            own = q[i]
            if i == 0 or first + i * WARPS < chunks:
                chunk = first + i * WARPS + warp
                sums = add_chunk(
                    *(sums, own, turn, x_rows, chunk * (RUN // 2) + pair, k_pairs),
                    *(T, BITS, HALF, TILES, PARTS, zeros is not None, WIDE),
                )
                chunk += AHEAD * WARPS
                own = fetch(words, scales, zeros, group_row, chunk, chunks, turn, PARTS, SHARED)
            coming = coming + (own,)  # noqa: RUF005
        q = coming
    even, odd = one_of_tiles(sums, 0, TILES), one_of_tiles(sums, 1, TILES)
    y = sum_of_warps(tl.reshape(tl.join(even, odd), (WARPS, 256 * TILES * SIDE)), WARPS)
    y = tl.reshape(y, (32 * SIDE, ROWS, 2 * TILES))
    lane = tl.arange(0, 32 * SIDE)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, 2 * TILES)[None, None, :]  # the tile, then even or odd
    n = (tl.program_id(0) * (8 * SIDE) + lane // 4) * ROWS + row
    known = tl.minimum(n, n_size - 1)
    if GROUP == 0:
        y *= tl.load(scales + known)
    if bias is not None:
        y += tl.load(bias + known).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, 32, ROWS, 2 * TILES)), (1, 2, 3, 0)))
        y = activate(gate, ACTIVATION) * up
        lane = tl.arange(0, 32)[:, None, None]
        n = (tl.program_id(0) * 8 + lane // 4) * ROWS + row
    m = first_row + column // 2 * 8 + lane % 4 * 2 + column % 2
    finish(y, residual, out, m * outputs + n, (m < rows) & (n < outputs), 0 if GATED else ACTIVATION)
