"""The product of many rows of x with packed weights for Hopper GPUs, in Gluon.

Weights are the left factor of `wgmma`, out of registers, and x is the right one, out of shared memory: Y^T = W X^T. One
warp fetches: the copy engine (TMA) brings tiles of x and the packed words of the weights into a ring in shared memory,
whose barriers say which are full and which empty. Two or three warp groups each read words of their own weight rows
where the tensor core wants them, unpack them and multiply. They take turns: the others unpack while one's products run.
A product's registers are not written before it is done (ptxas is trusted with that only within a step, and tests look
at the machine code). Importing this file imports Triton.

In the "chunks" layout (layouts.py) a thread finds what `wgmma` wants of it in whole words: of a chunk, words t, t + 4,
t + 8 and t + 12 of its rows (t: its place in four), with features 2t, 2t + 1, 2t + 8, 2t + 9 … of each 32. Rows of a
tile are permuted, so that threads read shared memory without conflicts and have gate and up together (`weight_row`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hasten.ops.linear.gemm_hopper_sums import finish, in_weight_order, leave, quarters, sum_of_piece, wait_for_splits
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
def place_of(number, rows, steps, splits, M: gl.constexpr):
    """The tile of x, the tile of the weight, the split, its first step and how many of work item `number`."""
    across = (rows + M - 1) // M
    split = number // across % splits
    first = steps * split // splits
    return number % across, number // across // splits, split, first, steps * (split + 1) // splits - first


@gluon.jit
def fetch(
    x_rows, word_rows, x_ring, word_ring, full, empty, rows, steps, splits, items,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, R: gl.constexpr, M: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The tiles of each step: features of x, words of every group's weight rows."""
    i = 0
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        across, tile, _, first, own = place_of(number, rows, steps, splits, M)
        for step in range(first, first + own):
            s = i % STAGES
            mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
            words: gl.constexpr = GROUPS * CHUNKS * word_rows.block_type.nbytes
            mbarrier.expect(full.index(s), PARTS * x_rows.block_type.nbytes + words)
            for chunk in gl.static_range(CHUNKS):
                column = (step * CHUNKS + chunk) * 64
                for group in gl.static_range(GROUPS):
                    block = (tile * GROUPS + group) * (16 * R)
                    place = word_ring.index((s * CHUNKS + chunk) * GROUPS + group)
                    tma.async_copy_global_to_shared(word_rows, [block, column], full.index(s), place)
            for part in gl.static_range(PARTS):
                column = (step * PARTS + part) * x_rows.block_type.shape[1]
                place = x_ring.index(s * PARTS + part)
                tma.async_copy_global_to_shared(x_rows, [across * M, column], full.index(s), place)
            i += 1


@gluon.jit
def ask_for(places):
    """Ask for what lies at some pointers in the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask_for_scales(scales, start, n_size, groups, part, parts, GROUP: gl.constexpr, N: gl.constexpr):
    """Ask for the scales of a tile's N rows, of `parts` times 64 features from `part` on; 4 rows share lines."""
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    block = gl.minimum(start // 4 + i % (N // 4), (n_size - 1) // 4) * (groups * 4)
    first = part * 64 // GROUP * 4
    last = gl.minimum((part + parts) * 64 // GROUP * 4, groups * 4 - 1)
    for line in range(first // 64, last // 64 + 1, 512 // N):
        place = gl.minimum(gl.maximum((line + i // (N // 4)) * 64, first), last)
        ask_for(scales + block + place)


@gluon.jit
def group_values(values, rows, part, GROUP: gl.constexpr):
    """Scales or zeros of the rows for 64 features: of the first and the second 32."""
    if GROUP == 32:
        place = values + rows + part * 8
        return gl.load(place), gl.load(place + 4)
    else:  # noqa: RET505 - the compiler would compile what follows a return as well
        value = gl.load(values + rows + part // (GROUP // 64) * 4)
        return value, value


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


@gluon.jit
def multiply(
    x_scales, scales, zeros, bias, residual, out, parts, counters, x_ring, word_ring, full, empty, turns,
    rows, outputs, n_size, groups, steps, splits, items,
    BITS: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr,
    WHICH: gl.constexpr, R: gl.constexpr, M: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 R weight rows by M rows of x of each work item."""
    WHOLE: gl.constexpr = x_ring.dtype == gl.int8  # x is integers, 128 features of a step together
    PARTS: gl.constexpr = 2 if not WHOLE and (BITS == 4 or CHUNKS == 2) else 1  # of a step's x, else of 64 features
    N: gl.constexpr = 64 * R
    FIRST: gl.constexpr = 1 if WHICH == 0 else 0  # it need not wait for its first turn
    NEXT: gl.constexpr = (WHICH + 1) % GROUPS
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 32 if WHOLE else 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 4 if WHOLE else 2)
    dtype: gl.constexpr = gl.float16 if x_ring.dtype == gl.float16 else gl.bfloat16
    i = 0  # steps of all items
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        across, tile, split, first, own = place_of(number, rows, steps, splits, M)
        start = (tile * GROUPS + WHICH) * N
        part = first * PARTS
        last = part + (own - 1) * PARTS
        scale, zero, scale2, zero2 = None, None, None, None
        if GROUP > 0:  # where a row's scales begin: (N/4, G, 4)
            n = gl.minimum(start + weight_row(gl.arange(0, N, gl.SliceLayout(1, left)), R), n_size - 1)
            scale_rows = (n >> 2) * (groups * 4) + (n & 3)
            ask_for_scales(scales, start, n_size, groups, part, own * PARTS, GROUP, N)
            scale = group_values(scales, scale_rows, part, GROUP)
            if PARTS == 2:
                scale2 = group_values(scales, scale_rows, part + 1, GROUP)
            if zeros is not None:
                zero = group_values(zeros, scale_rows, part, GROUP)
                if PARTS == 2:
                    zero2 = group_values(zeros, scale_rows, part + 1, GROUP)
        else:
            rows_here = gl.minimum(start + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), n_size - 1)
            ask_for(scales + rows_here)
        acc = gl.zeros([N, M], gl.int32 if WHOLE else gl.float32, sums)
        for step in range(first, first + own):
            s = i % STAGES
            mbarrier.wait(full.index(s), (i // STAGES) & 1)
            q = in_product_order(word_ring.index(s * CHUNKS * GROUPS + WHICH).load(word_layout(R)), R)
            if WHOLE:
                weight = bytes_of(q, left, N)
            else:
                pairs = unpack(q, BITS, dtype)
                weight = weights_of(pairs[0], pairs[1], scale, zero, dtype, left, BITS, GROUP, N)
            if CHUNKS == 2:
                q = in_product_order(word_ring.index((s * 2 + 1) * GROUPS + WHICH).load(word_layout(R)), R)
                if WHOLE:
                    both = gl.join(weight, bytes_of(q, left, N)).permute([0, 2, 1]).reshape([N, 128])
                    weight = gl.convert_layout(both, left, assert_trivial=True)
                else:
                    pairs = unpack(q, BITS, dtype)
                    second = weights_of(pairs[0], pairs[1], scale2, zero2, dtype, left, BITS, GROUP, N)
            elif PARTS == 2:
                second = weights_of(pairs[2], pairs[3], scale2, zero2, dtype, left, BITS, GROUP, N)
            if GROUP > 0:  # of the next step
                part = gl.minimum((step + 1) * PARTS, last)
                scale = group_values(scales, scale_rows, part, GROUP)
                if PARTS == 2:
                    scale2 = group_values(scales, scale_rows, part + 1, GROUP)
                if zeros is not None:
                    zero = group_values(zeros, scale_rows, part, GROUP)
                    if PARTS == 2:
                        zero2 = group_values(zeros, scale_rows, part + 1, GROUP)
            mbarrier.wait(turns.index(WHICH), (i + FIRST) & 1)
            acc = warpgroup_mma(weight, x_ring.index(s * PARTS).permute([1, 0]), acc, is_async=True)
            if PARTS == 2:
                acc = warpgroup_mma(second, x_ring.index(s * PARTS + 1).permute([1, 0]), acc, is_async=True)
            if GROUPS == 2 and not WHOLE:  # as measured; else the next group's products fill gaps between this one's
                acc = warpgroup_mma_wait(PARTS - 1, deps=[acc])
            mbarrier.arrive(turns.index(NEXT), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(s), count=1)
            i += 1
        item = (tile * ((rows + M - 1) // M) + across) * GROUPS + WHICH
        if WHOLE:
            acc = acc.to(gl.float32)
        # In four pieces of M / 4 rows of x: four sums of a thread next to each other, then the next thread's.
        bits = acc.reshape([R, 4, 2, 8, 4, M // 32, 4, 2]).permute([4, 0, 5, 1, 3, 6, 2, 7])
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        fours = quarters(bits.reshape([N * M]), N * M // 4, layout)
        here = parts
        if SPLIT:
            here = parts + item.to(gl.int64) * splits * (N * M)
            place = gl.arange(0, N * M // 4, layout)
            for piece in gl.static_range(4):
                there = place < gl.where(piece % splits != split, N * M // 4, 0)
                gl.store(here + (split * 4 + piece).to(gl.int64) * (N * M // 4) + place, fours[piece], mask=there)
            wait_for_splits(counters + item, splits)
        for piece in range(split, 4, splits):
            mine = gl.where(
                piece < 2, gl.where(piece == 0, fours[0], fours[1]), gl.where(piece == 2, fours[2], fours[3])
            )
            flat_piece = sum_of_piece(mine, here, piece, split, splits, N * M // 4, SPLIT)
            bits_piece = flat_piece.reshape([R, M // 32, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6])
            finish(
                in_weight_order(bits_piece.reshape([N, M // 4]), R, M // 4), x_scales, scales, bias, residual, out,
                rows, outputs, n_size, across * M + piece * (M // 4), start, GROUP, ACTIVATION, GATED, N, M // 4,
            )  # fmt: skip
        if SPLIT:
            leave(counters + item, splits)


@gluon.jit
def take_part(
    WHICH: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    GROUPS: gl.constexpr, R: gl.constexpr, M: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, x_scales, zeros, bias, residual, parts, counters, x_rows, word_rows,
    scales, out, x_ring, word_ring, full, empty, turns, rows, outputs, n_size, groups, steps, splits, items,
):  # fmt: skip
    """Multiply as one of the groups; the last part is to fetch."""
    PARTS: gl.constexpr = x_ring.shape[0] // STAGES
    if WHICH == GROUPS:
        fetch(
            x_rows, word_rows, x_ring, word_ring, full, empty, rows, steps, splits, items,
            PARTS, GROUPS, R, M, CHUNKS, STAGES,
        )  # fmt: skip
    else:
        multiply(
            x_scales, scales, zeros, bias, residual, out, parts, counters, x_ring, word_ring, full, empty, turns,
            rows, outputs, n_size, groups, steps, splits, items,
            BITS, GROUP, ACTIVATION, GATED, GROUPS, WHICH, R, M, CHUNKS, SPLIT, STAGES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "n_size", "groups", "steps", "splits"])
def many_rows(
    x_rows,  # descriptors: (rows, K) in blocks of M rows by 64 features; as int8 by 128, in the words' order
    word_rows,  # (N/4, words · 4) int32, in blocks of 16 R by 64
    x_scales,  # (rows,) where x is int8
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
    groups,
    steps,  # of K
    splits,  # of the steps
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    GROUPS: gl.constexpr,
    R: gl.constexpr,
    M: gl.constexpr,
    CHUNKS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Work items, of 64 R weight rows for each group by M rows of x over one part of K, one after the other."""
    WIDTH: gl.constexpr = x_rows.block_type.shape[1]
    PARTS: gl.constexpr = (128 if BITS == 4 or CHUNKS == 2 else 64) // WIDTH  # of x, in a step
    N: gl.constexpr = 64 * R * GROUPS
    items = (rows + M - 1) // M * ((n_size + N - 1) // N) * splits
    x_ring = gl.allocate_shared_memory(x_rows.dtype, [STAGES * PARTS, M, WIDTH], x_rows.layout)
    word_ring = gl.allocate_shared_memory(word_rows.dtype, [STAGES * CHUNKS * GROUPS, 16 * R, 64], word_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)  # all groups have read it
    # Registers of a thread in each group and for fetching: in all those that the launch asks for (gemm_hopper.py).
    if GROUPS == 2:
        gl.warp_specialize([(take_part, (
            which, BITS, GROUP, ACTIVATION, GATED, GROUPS, R, M, CHUNKS, SPLIT, STAGES, x_scales, zeros, bias,
            residual, parts, counters, x_rows, word_rows, scales, out, x_ring, word_ring, full, empty, turns, rows,
            outputs, n_size, groups, steps, splits, items,
        )) for which in (0, 1, 2)], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([(take_part, (
            which, BITS, GROUP, ACTIVATION, GATED, GROUPS, R, M, CHUNKS, SPLIT, STAGES, x_scales, zeros, bias,
            residual, parts, counters, x_rows, word_rows, scales, out, x_ring, word_ring, full, empty, turns, rows,
            outputs, n_size, groups, steps, splits, items,
        )) for which in (0, 1, 2, 3)], [4, 4, 1], [160, 160, 24])  # fmt: skip
