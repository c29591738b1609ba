"""The products of decode_kernels.py: a program's rows of a matrix times x in shared memory, through a ring of tiles.

A tile is R rows by KT words of the matrix, each two numbers of 16 bits; in shared memory x has the even features of a
tile, then the odd ones. A warp has several rows of a tile, since it reads x once for all of them. Importing this file
imports Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hasten.ops.linear.triton_parts import activate

OFFSETS = gl.constexpr(16)  # numbers of a layer in the table of `decode_layers`


@gluon.constexpr_function
def tile_layout(warps, across):
    """Where threads have a tile: 16 bytes of a row each, a warp 512; `across` warps have rows of their own."""
    return gl.BlockedLayout([1, 4], [1, 32], [across, warps // across], [1, 0])


@gluon.jit
def in_product_order(x, KT: gl.constexpr):
    """Features of x as they lie in shared memory: the even ones of a tile, then the odd ones."""
    SIZE: gl.constexpr = x.shape[0]
    return x.reshape([SIZE // (2 * KT), KT, 2]).permute([0, 2, 1]).reshape([SIZE])


@gluon.jit
def places_in(
    matrix, block, QKV: gl.constexpr, HIDDEN: gl.constexpr, ATTENDED: gl.constexpr, INNER: gl.constexpr,
    ACROSS: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Where the rows of a block begin in a matrix, in 16 bytes, and how many the matrix has."""
    pieces = gl.where(matrix == 1, ATTENDED // 8, gl.where(matrix == 3, INNER // 8, HIDDEN // 8))
    rows = gl.where(matrix == 0, QKV, gl.where(matrix == 2, 2 * INNER, HIDDEN))
    i = block * R + gl.arange(0, R, gl.SliceLayout(1, tile_layout(gl.num_warps(), ACROSS)))
    gated = i >> 6 << 6 | (i >> 1) & 31 | (i & 1) << 5  # gate and up take turns
    return gl.minimum(gl.where(matrix == 2, gated, i), rows - 1) * pieces, rows


@gluon.jit
def ask(
    ring, slot, w, table, at, starts, item, block, step, end, programs,
    QKV: gl.constexpr, HIDDEN: gl.constexpr, ATTENDED: gl.constexpr, INNER: gl.constexpr,
    ACROSS: gl.constexpr, R: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Ask for a tile of the weights, and move on to the next one.

    item: 4 · layer + matrix; block: of R rows of it; step: of KT words; at: where the matrix is, in 16 bytes; starts:
    where the block's rows begin in it.
    """
    layout: gl.constexpr = tile_layout(gl.num_warps(), ACROSS)
    matrix = item & 3
    pieces = gl.where(matrix == 1, ATTENDED // 8, gl.where(matrix == 3, INNER // 8, HIDDEN // 8))  # 16 bytes, of a row
    c = gl.arange(0, KT, gl.SliceLayout(0, layout))
    inside = (step * (KT // 4) + c // 4 < pieces) & (item < end)
    places = ((at + starts) * 4)[:, None] + (step * KT + c)[None, :]
    async_copy.async_copy_global_to_shared(ring.index(slot), w + places, mask=inside[None, :])
    async_copy.commit_group()
    step += 1
    if step * (KT // 4) >= pieces:
        step = 0
        block += programs
        starts, rows = places_in(matrix, block, QKV, HIDDEN, ATTENDED, INNER, ACROSS, R)
        if block * R >= rows:
            item += 1
            block = gl.program_id(0)
            starts, rows = places_in(item & 3, block, QKV, HIDDEN, ATTENDED, INNER, ACROSS, R)
            at = gl.load(table + (item >> 2) * OFFSETS + (item & 3), mask=item < end, other=0)
    return at, starts, item, block, step


@gluon.jit
def halves(words, NARROW: gl.constexpr):
    """The two 16-bit floats of a word in float32. NARROW: float16, else bfloat16."""
    if NARROW:
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    return low, high


@gluon.jit
def multiply(
    xs, factor, x, qkv, inner, ring, slot, w, half, table, own_table, at, starts, item, block, step, end, programs,
    MATRIX: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr, ACTIVATION: gl.constexpr, BIASED: gl.constexpr,
    QKV: gl.constexpr, HIDDEN: gl.constexpr, ATTENDED: gl.constexpr, INNER: gl.constexpr, ACROSS: gl.constexpr,
    R: gl.constexpr, KT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program's rows of one matrix (ROWS, SIZE), whose right factor is in xs; the ring moves on."""
    NARROW: gl.constexpr = half.dtype.element_ty == gl.float16
    layout: gl.constexpr = tile_layout(gl.num_warps(), ACROSS)
    wide: gl.constexpr = gl.SliceLayout(0, layout)
    for own in range(gl.program_id(0), (ROWS + R - 1) // R, programs):
        n = own * R + gl.arange(0, R, gl.SliceLayout(1, layout))
        if MATRIX % 2 == 1:
            residual = gl.load(x + n, mask=n < ROWS, other=0.0, cache_modifier=".cg")
        acc = gl.zeros([R, KT], gl.float32, layout)
        for k in range((SIZE // 2 + KT - 1) // KT):
            async_copy.wait_group(STAGES - 2)
            low, high = halves(ring.index(slot).load(layout), NARROW)
            low_x, high_x = xs.index(2 * k).load(wide)[None, :], xs.index(2 * k + 1).load(wide)[None, :]
            acc = acc + low * low_x + high * high_x  # in this order two FMAs each
            free = gl.where(slot == 0, STAGES - 1, slot - 1)
            at, starts, item, block, step = ask(
                ring, free, w, table, at, starts, item, block, step, end, programs, QKV, HIDDEN, ATTENDED, INNER,
                ACROSS, R, KT,
            )  # fmt: skip
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        y = gl.sum(acc, axis=1)
        if MATRIX == 0:
            y *= factor
            if BIASED:
                y += gl.load(half + gl.load(own_table + 8) * 8 + n, mask=n < ROWS, other=0.0).to(gl.float32)
            gl.store(qkv + n, y.to(qkv.dtype.element_ty), mask=n < ROWS)
        elif MATRIX == 2:
            store_gated(inner, own, y * factor, INNER, ACTIVATION, R)
        else:
            gl.store(x + n, residual + y, mask=n < ROWS)
    return slot, at, starts, item, block, step


@gluon.jit
def store_gated(inner, own, y, OUTPUTS: gl.constexpr, ACTIVATION: gl.constexpr, R: gl.constexpr):
    """Store the outputs of a block of rows, of which gate and up take turns."""
    WARPS: gl.constexpr = gl.num_warps()
    singles: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    gate, up = gl.split(gl.convert_layout(y, gl.BlockedLayout([2], [32], [WARPS], [0])).reshape([R // 2, 2]))
    places = own * (R // 2) + gl.arange(0, R // 2, singles)
    result = gl.convert_layout(activate(gate, ACTIVATION) * up, singles)
    gl.store(inner + places, result.to(inner.dtype.element_ty), mask=places < OUTPUTS)
