"""Packed words in the registers of a warp group, as `wgmma` takes its left factor (gemm_hopper_kernels.py).

In the "chunks" layout (layouts.py) a thread finds what `wgmma` wants of it in whole words: of a chunk, words t, t + 4,
t + 8 and t + 12 of its rows (t: its place in four), with features 2t, 2t + 1, 2t + 8, 2t + 9 … of each 32. Rows of a
tile are permuted, so that threads read shared memory without conflicts and have gate and up together (`weight_row`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hasten.ops.linear.triton_gemm import UNPACK_INT4_BF16, UNPACK_INT4_FP16, UNPACK_INT8_BF16, UNPACK_INT8_FP16


@gluon.constexpr_function
def repeated(dtype, count):
    """A tuple of the same dtype."""
    return (dtype,) * count


@gluon.jit
def unpack(words, BITS: gl.constexpr, dtype: gl.constexpr):
    """Words (N, 16) -> their 4 or 2 pairs, each (N, 16, 2), as exact numbers q - 8 or q - 128."""
    twice = gl.join(words, words)  # of each two equal ones the assembly reads the first and fills both halves
    kinds: gl.constexpr = repeated(dtype, 16 // BITS)
    int4: gl.constexpr = UNPACK_INT4_FP16 if dtype == gl.float16 else UNPACK_INT4_BF16
    int8: gl.constexpr = UNPACK_INT8_FP16 if dtype == gl.float16 else UNPACK_INT8_BF16
    text: gl.constexpr = int4 if BITS == 4 else int8
    outputs: gl.constexpr = "=&r,=&r,=&r,=&r,r,r" if BITS == 4 else "=&r,=&r,r,r"
    return gl.inline_asm_elementwise(text, outputs, [twice], dtype=kinds, is_pure=True, pack=2)


@gluon.jit
def times(a, b):
    """a · b, two numbers at a time."""
    text: gl.constexpr = "mul.rn.f16x2 $0, $1, $2;" if a.dtype == gl.float16 else "mul.rn.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def minus(a, b):
    """a - b, two numbers at a time."""
    text: gl.constexpr = "sub.rn.f16x2 $0, $1, $2;" if a.dtype == gl.float16 else "sub.rn.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.constexpr_function
def word_layout(R):
    """Where a warp group's threads have the words of a chunk, (16 R blocks of 4 rows, 16 words · 4 rows)."""
    t, far = [[0, 4], [0, 8]], [[0, 16], [0, 32]]
    if R == 2:
        regs, lanes, warps = [[0, 1], [8, 0]], [[0, 2], [4, 0], [1, 0]], [[2, 0], [16, 0]]
    else:
        regs, lanes, warps = [[8, 0]], [[0, 1], [0, 2], [4, 0]], [[1, 0], [2, 0]]
    return gl.DistributedLinearLayout(regs + far, t + lanes, warps, [], [16 * R, 64])


@gluon.jit
def in_product_order(q, R: gl.constexpr):
    """Words (16 R blocks, 16 · 4) -> (64 R rows as the product has them, 16)."""
    if R == 2:  # blocks 43210, words, rows of a block 10
        bits = q.reshape([2, 2, 2, 2, 2, 16, 2, 2]).permute([1, 0, 3, 7, 4, 2, 6, 5])
    else:
        bits = q.reshape([2, 2, 2, 2, 16, 2, 2]).permute([2, 3, 0, 1, 5, 6, 4])
    return bits.reshape([64 * R, 16])


@gluon.jit
def weight_row(r, R: gl.constexpr):
    """The row of the weight's tile that is the product's row r."""
    if R == 2:
        low = (r & 1) << 1 | (r >> 3 & 1) | (r >> 2 & 1) << 2
        return low | (r >> 4 & 1) << 3 | (r >> 1 & 1) << 4 | (r >> 6 & 1) << 5 | (r >> 5 & 1) << 6
    else:  # noqa: RET505 - the compiler would compile what follows a return as well
        return (r & 3) | (r >> 4 & 3) << 2 | (r >> 2 & 1) << 4 | (r >> 3 & 1) << 5


@gluon.jit
def weights_of(
    low, high, scale, zero, dtype: gl.constexpr, left: gl.constexpr, BITS: gl.constexpr,
    GROUP: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """64 features of N rows, out of two pairs of their words (N, 16, 2), times their scales."""
    low = gl.convert_layout(low.reshape([N, 32]), left, assert_trivial=True)
    high = gl.convert_layout(high.reshape([N, 32]), left, assert_trivial=True)
    if GROUP > 0:
        if zero is not None:
            middle: gl.constexpr = 8.0 if BITS == 4 else 0.0
            low = minus(low, (zero[0].to(gl.float32) - middle).to(dtype)[:, None])
            high = minus(high, (zero[1].to(gl.float32) - middle).to(dtype)[:, None])
        low = times(low, scale[0].to(dtype)[:, None])
        high = times(high, scale[1].to(dtype)[:, None])
    both = gl.join(low, high).permute([0, 2, 1]).reshape([N, 64])
    return gl.convert_layout(both, left, assert_trivial=True)


@gluon.jit
def bytes_of(words, left: gl.constexpr, N: gl.constexpr):
    """Words (N, 16) of stored bytes -> 64 integers of N rows, in the words' order, as `norm_row` has x."""
    twice = gl.join(words, words)
    four = gl.join(twice, twice)  # of each four equal ones the assembly reads the first and fills all bytes
    own = gl.inline_asm_elementwise(
        "xor.b32 $0, $1, 0x80808080;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4
    )
    return gl.convert_layout(own.reshape([N, 64]), left, assert_trivial=True)
