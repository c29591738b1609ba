"""Triton kernels of several rows of x: packed weights become exact 16-bit integers in registers, in front of `wgmma`.

Weights are the left factor, because a Hopper tensor core takes that one from registers. They come from the "chunks"
layout as words of several numbers and are only spread after they lie where the tensor core wants them: two at a time,
next to each other. Importing this file imports Triton.
"""

import triton
import triton.language as tl

from hasten.ops.linear.triton_parts import GATE_ROWS, ROWS, activate, finish

UNPACK_INT4_BF16 = tl.constexpr(
    """{
    .reg .b32 w;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 4;
    lop3.b32 $1, w, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 8;
    lop3.b32 $2, w, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 w, 0x43084308;
    sub.rn.bf16x2 $0, $0, w;
    sub.rn.bf16x2 $1, $1, w;
    sub.rn.bf16x2 $2, $2, w;
    sub.rn.bf16x2 $3, $3, w;
    }"""
)
UNPACK_INT4_FP16 = tl.constexpr(
    """{
    .reg .b32 w;
    lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
    shr.u32 w, $4, 4;
    lop3.b32 $1, w, 0x000F000F, 0x64006400, 0xEA;
    shr.u32 w, $4, 8;
    lop3.b32 $2, w, 0x000F000F, 0x64006400, 0xEA;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000F000F, 0x64006400, 0xEA;
    mov.b32 w, 0x64086408;
    sub.rn.f16x2 $0, $0, w;
    sub.rn.f16x2 $1, $1, w;
    sub.rn.f16x2 $2, $2, w;
    sub.rn.f16x2 $3, $3, w;
    }"""
)
# bfloat16 has 7 bits of mantissa: 128 + the last 7 bits, minus 256, or 128 where the eighth is set.
UNPACK_INT8_BF16 = tl.constexpr(
    """{
    .reg .b32 w, high;
    shr.u32 w, $2, 8;
    lop3.b32 $0, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $1, w, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 high, $2, 0x00800080, 0x43004300, 0xAE;
    sub.rn.bf16x2 $0, $0, high;
    lop3.b32 high, w, 0x00800080, 0x43004300, 0xAE;
    sub.rn.bf16x2 $1, $1, high;
    }"""
)
UNPACK_INT8_FP16 = tl.constexpr(
    """{
    .reg .b32 w;
    shr.u32 w, $2, 8;
    lop3.b32 $0, $2, 0x00FF00FF, 0x64006400, 0xEA;
    lop3.b32 $1, w, 0x00FF00FF, 0x64006400, 0xEA;
    mov.b32 w, 0x64806480;
    sub.rn.f16x2 $0, $0, w;
    sub.rn.f16x2 $1, $1, w;
    }"""
)


@triton.jit
def unpack(words, BITS: tl.constexpr, HALF: tl.constexpr):
    """Words of 8 or 4 numbers -> 4 or 2 words of two 16-bit floats, q - 8 or q - 128: numbers i and i + 4, or i + 2."""
    if BITS == 4:
        return tl.inline_asm_elementwise(
            UNPACK_INT4_FP16 if HALF else UNPACK_INT4_BF16,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505 - Triton's compiler would compile what follows a return as well
        return tl.inline_asm_elementwise(
            UNPACK_INT8_FP16 if HALF else UNPACK_INT8_BF16,
            "=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def side_by_side(low, high, N: tl.constexpr, K: tl.constexpr):
    """(N, K / 2) twice -> (N, K): one of these, one of those."""
    return tl.reshape(tl.join(low, high), (N, K))


@triton.jit
def halves_of(words, dtype: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Words of two 16-bit floats (N, K / 2) -> (N, K)."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    return side_by_side(low, (words >> 16).to(tl.int16).to(dtype, bitcast=True), N, K)


@triton.jit
def numbers(words, NUMBER: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The same in float32, for the interpreter, which knows no assembly."""
    low = ((words >> (BITS * NUMBER)) & ((1 << BITS) - 1)).to(tl.float32)
    high = ((words >> (BITS * NUMBER + 16)) & ((1 << BITS) - 1)).to(tl.float32)
    return side_by_side(low, high, N, K) - (8.0 if BITS == 4 else 128.0)


@triton.jit
def waited_for(acc):
    """acc, when its products are done. Needed at the end of each step: a product still reads its weights' registers.

    Triton (3.6) lets the last product of a step run on into the next one, which loads other weights into them.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sum_of_splits(acc, parts, counters, tile, N: tl.constexpr, M: tl.constexpr):
    """Whether this program is the last of its tile, and then the sum of the parts, first to last.

    The last one sets the counter back to 0 for the next launch.
    """
    place = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    splits = tl.num_programs(2)
    own = parts + tile.to(tl.int64) * splits * (N * M)
    tl.store(own + tl.program_id(2) * (N * M) + place, acc)
    tl.debug_barrier()  # all threads have stored before one of them counts
    before = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    last = before == splits - 1
    if last:
        acc = tl.load(own + place, cache_modifier=".cg")
        for other in range(1, splits):
            acc += tl.load(own + other * (N * M) + place, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return acc, last


@triton.jit(do_not_specialize=["rows", "groups", "steps_per_split"])
def several_rows(
    x,  # (rows, K) bfloat16 or float16
    data,  # (N/4, words, 4) int32
    scales,  # (N/4, G, 4), or float32 (N,)
    zeros,  # as scales, or None: all are the middle
    bias,  # (N,)
    residual,  # (rows, outputs)
    out,  # (rows, outputs)
    parts,  # float32: every split's tile
    counters,  # int32, of each tile, 0
    rows,
    outputs,
    n_size,
    k_size,
    row_stride,  # words of a row
    groups,
    steps_per_split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    N: tl.constexpr,  # weight rows of a tile
    M: tl.constexpr,  # rows of x
    CHUNKS: tl.constexpr,  # of 16 words of a row, in a step
    SPLIT: tl.constexpr,  # K is, among the programs of the third dimension
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,  # weights are multiplied by the scale of their group, and rounded; else their products are
    WHOLE: tl.constexpr,  # K needs no mask
    WIDE: tl.constexpr,  # in the interpreter
):
    """One tile of outputs over one part of K, in float32."""
    PAIRS: tl.constexpr = 4 if BITS == 4 else 2
    RUN: tl.constexpr = 32 * PAIRS  # features of a chunk
    WORDS: tl.constexpr = 16 * CHUNKS
    K: tl.constexpr = 32 * CHUNKS  # features that one product takes
    tile = tl.program_id(0)
    n = tile * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    block = tl.minimum(tile * (N // ROWS) + tl.arange(0, N // ROWS), (n_size - 1) // ROWS)
    word = tl.arange(0, WORDS)
    column = tl.arange(0, K)
    start = data + block[:, None, None].to(tl.int64) * (row_stride * ROWS) + tl.arange(0, ROWS)[None, None, :]
    features = column // 32 * RUN + column % 32  # of the first pairs
    x_rows = x + m.to(tl.int64)[None, :] * k_size
    row = tl.minimum(n, n_size - 1)
    group_rows = block[:, None].to(tl.int64) * (groups * ROWS) + tl.arange(0, ROWS)[None, :]
    first = tl.program_id(2) * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(row_stride, WORDS))
    acc = tl.zeros((N, M), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * WORDS + word
        if CHUNKS > 1:
            at = tl.minimum(at, row_stride - 1)
        q = tl.load(start + at[None, :, None] * ROWS)  # (N/4, words, 4)
        q = tl.reshape(tl.permute(q, (0, 2, 1)), (N, WORDS))
        if not WIDE:
            pairs = unpack(q, BITS, HALF)
        for pair in tl.static_range(PAIRS):
            k = step * (CHUNKS * RUN) + 32 * pair + features
            mask = (m < rows)[None, :] if WHOLE else (m < rows)[None, :] & (k < k_size)[:, None]
            part_of_x = tl.load(x_rows + k[:, None], mask=mask, other=0.0)
            if WIDE:
                weight = numbers(q, pair, BITS, N, K)
                part_of_x = part_of_x.to(tl.float32)
            else:
                weight = halves_of(pairs[pair], x.dtype.element_ty, N, K)
            if GROUP == 0:
                acc = tl.dot(weight, part_of_x, acc)
            else:
                group = group_rows + (step * RUN + 32 * pair) // GROUP * ROWS
                scale = tl.reshape(tl.load(scales + group), (N,))
                if zeros is not None:
                    zero = tl.reshape(tl.load(zeros + group), (N,)).to(tl.float32) - (8.0 if BITS == 4 else 0.0)
                    weight -= zero.to(weight.dtype)[:, None]
                if SCALED:
                    acc = tl.dot(weight * scale.to(weight.dtype)[:, None], part_of_x, acc)
                else:
                    acc += tl.dot(weight, part_of_x) * scale.to(tl.float32)[:, None]
        if not WIDE and (GROUP == 0 or SCALED):
            acc = waited_for(acc)
    if SPLIT:
        number = tl.program_id(1) * tl.num_programs(0) + tile
        acc, done = sum_of_splits(acc, parts, counters, number, N, M)
    else:
        done = True
    if done:
        if GROUP == 0:
            acc *= tl.load(scales + row)[:, None]
        if bias is not None:
            acc += tl.load(bias + row).to(tl.float32)[:, None]
        if GATED:
            both = tl.reshape(acc, (N // (2 * GATE_ROWS), 2, GATE_ROWS, M))
            gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
            product = tl.reshape(activate(gate, ACTIVATION) * up, (N // 2, M))
            output = tile * (N // 2) + tl.arange(0, N // 2)
            places = m.to(tl.int64)[None, :] * outputs + output[:, None]
            finish(product, residual, out, places, (m < rows)[None, :] & (output < outputs)[:, None], 0)
        else:
            places = m.to(tl.int64)[None, :] * outputs + n[:, None]
            finish(acc, residual, out, places, (m < rows)[None, :] & (n < outputs)[:, None], ACTIVATION)
