"""What follows the products of gemm_hopper_kernels.py: the sum of a tile's splits, and what is beside a product.

A warp group has its tile (64 R rows of the weight, M rows of x) in registers and finishes it in four pieces of M / 4
rows of x, by code a quarter as long. Where K is split, each program of a tile adds up some of the pieces.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hasten.ops.linear.triton_parts import GATE_ROWS, activate

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name up to Triton 3.6, and from 3.7 on


@gluon.jit
def in_weight_order(y, R: gl.constexpr, M: gl.constexpr):
    """(64 R rows as the product has them, M) -> the same in the weight's order."""
    if R == 2:
        bits = y.reshape([2, 2, 2, 2, 2, 2, 2, M]).permute([1, 0, 5, 2, 4, 6, 3, 7])
    else:
        bits = y.reshape([2, 2, 2, 2, 2, 2, M]).permute([2, 3, 0, 1, 4, 5, 6])
    return bits.reshape([64 * R, M])


@gluon.jit
def wait_for_splits(counter, splits):
    """Wait until all splits of a tile have stored their parts. The program has to be one of a cooperative launch."""
    barrier()  # all threads have stored before one of them counts
    seen = (gl.atomic_add(counter, 1, sem="acq_rel") & 0xFFFF) + 1
    while seen < splits:
        seen = gl.atomic_add(counter, 0, sem="acquire") & 0xFFFF


@gluon.jit
def leave(counter, splits):
    """Count who has read the parts; the last one sets the counter back to 0 for the next launch."""
    barrier()
    if gl.atomic_add(counter, 0x10000, sem="acq_rel") >> 16 == splits - 1:
        gl.store(counter, 0)


@gluon.jit
def quarters(flat, SIZE: gl.constexpr, layout: gl.constexpr):
    """Four times SIZE numbers -> the first, second, third and fourth."""
    low, high = gl.split(flat.reshape([2, 2, SIZE]).permute([1, 2, 0]))
    first, second = gl.split(low.permute([1, 0]))
    third, fourth = gl.split(high.permute([1, 0]))
    return (
        gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(second, layout, assert_trivial=True),
        gl.convert_layout(third, layout, assert_trivial=True), gl.convert_layout(fourth, layout, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def sum_of_piece(mine, parts, piece, split, splits, SIZE: gl.constexpr, SPLIT: gl.constexpr):
    """The sum of one of four pieces of all parts, first to last; the program's own is in registers."""
    if not SPLIT:
        return mine
    else:  # noqa: RET505 - the compiler would compile what follows a return as well
        layout: gl.constexpr = mine.type.layout
        place = gl.arange(0, SIZE, layout)
        total = gl.zeros([SIZE], gl.float32, layout)
        AT_ONCE: gl.constexpr = 4 if SIZE <= 2048 else 2
        for base in range(0, splits, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                other = base + i
                there = place < gl.where((other < splits) & (other != split), SIZE, 0)
                start = parts + (other * 4 + piece).to(gl.int64) * SIZE
                part = gl.load(start + place, mask=there, other=0.0, cache_modifier=".cg")
                total += gl.where(other == split, mine, part)
        return total


@gluon.jit
def finish(
    y, x_scales, scales, bias, residual, out, rows, outputs, n_size, row, start,
    GROUP: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, N: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Scales of rows, bias, activation or gate, residual, store; the rows of y (N, M) are in the weight's order."""
    layout: gl.constexpr = y.type.layout
    n = start + gl.arange(0, N, gl.SliceLayout(1, layout))
    last = gl.minimum(n, n_size - 1)
    if GROUP == 0:
        y *= gl.load(scales + last)[:, None]
    if x_scales is not None:
        m = gl.minimum(row + gl.arange(0, M, gl.SliceLayout(0, layout)), rows - 1)
        y *= gl.load(x_scales + m)[None, :]
    if bias is not None:
        y += gl.load(bias + last).to(gl.float32)[:, None]
    if GATED:
        both = y.reshape([N // (2 * GATE_ROWS), 2, GATE_ROWS, M]).permute([0, 2, 3, 1])
        gate, up = gl.split(both)
        y = (activate(gate, ACTIVATION) * up).reshape([N // 2, M])
        write(y, residual, out, rows, outputs, row, start // 2, N // 2, M)
    else:
        write(activate(y, ACTIVATION), residual, out, rows, outputs, row, start, N, M)


@gluon.constexpr_function
def output_layout(N, bytes):
    """Where threads have a tile (N, M) when they store it: 16 bytes of neighbouring outputs each."""
    own = 16 // bytes
    lanes = min(32, N // own)
    return gl.BlockedLayout([own, 1], [lanes, 32 // lanes], [1, 4], [0, 1])


@gluon.jit
def write(y, residual, out, rows, outputs, row, start, N: gl.constexpr, M: gl.constexpr):
    """Add the residual and store: y (N, M) becomes (M, N) of a row-major matrix."""
    layout: gl.constexpr = output_layout(N, out.dtype.element_ty.primitive_bitwidth // 8)
    n = start + gl.arange(0, N, gl.SliceLayout(1, layout))
    m = row + gl.arange(0, M, gl.SliceLayout(0, layout))
    places = m[None, :].to(gl.int64) * outputs + n[:, None]
    mask = (m < rows)[None, :] & (n < outputs)[:, None]
    if residual is not None:
        y = gl.convert_layout(y, layout) + gl.load(residual + places, mask=mask, other=0.0).to(gl.float32)
        gl.store(out + places, y.to(out.dtype.element_ty), mask=mask)
    else:
        gl.store(out + places, gl.convert_layout(y.to(out.dtype.element_ty), layout), mask=mask)
