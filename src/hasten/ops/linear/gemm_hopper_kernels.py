"""The product of many rows of x with packed weights for Hopper GPUs, in Gluon.

Weights are the left factor of `wgmma`, out of registers, and x is the right one, out of shared memory: Y^T = W X^T. One
warp fetches: the copy engine (TMA) brings tiles of x and the packed words of the weights into a ring in shared memory,
whose barriers say which are full and which empty. Two or three warp groups each read words of their own weight rows
where the tensor core wants them, unpack them and multiply. They take turns: the others unpack while one's products run.
A product's registers are not written before it is done (ptxas is trusted with that only within a step, and tests look
at the machine code). Importing this file imports Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hasten.ops.linear.gemm_hopper_sums import finish, in_weight_order, leave, quarters, sum_of_piece, wait_for_splits
from hasten.ops.linear.gemm_hopper_words import bytes_of, in_product_order, unpack, weight_row, weights_of, word_layout


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
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The tiles of each step: features of x, words of every group's weight rows."""
    BYTES: gl.constexpr = PARTS * x_rows.block_type.nbytes + GROUPS * CHUNKS * word_rows.block_type.nbytes
    i, ahead = 0, 0
    if EARLY:  # the first words, before there is an x
        _, tile, _, first, own = place_of(gl.program_id(0), rows, steps, splits, M)
        ahead = gl.minimum(own, STAGES)
        for step in range(first, first + ahead):
            fetch_words(word_rows, word_ring, full, tile, step, step - first, BYTES, GROUPS, R, CHUNKS)
        gdc_wait()
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        across, tile, _, first, own = place_of(number, rows, steps, splits, M)
        for step in range(first, first + own):
            s = i % STAGES
            if i >= ahead:
                mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
                fetch_words(word_rows, word_ring, full, tile, step, s, BYTES, GROUPS, R, CHUNKS)
            for part in gl.static_range(PARTS):
                column = (step * PARTS + part) * x_rows.block_type.shape[1]
                place = x_ring.index(s * PARTS + part)
                tma.async_copy_global_to_shared(x_rows, [across * M, column], full.index(s), place)
            i += 1
    if EARLY:  # all is under way: what comes behind may take the room of the programs that end
        gdc_launch_dependents()


@gluon.jit
def fetch_words(
    word_rows, word_ring, full, tile, step, s,
    BYTES: gl.constexpr, GROUPS: gl.constexpr, R: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """The words of a step, to stage s, which waits for BYTES in all."""
    mbarrier.expect(full.index(s), BYTES)
    for chunk in gl.static_range(CHUNKS):
        column = (step * CHUNKS + chunk) * 64
        for group in gl.static_range(GROUPS):
            block = (tile * GROUPS + group) * (16 * R)
            place = word_ring.index((s * CHUNKS + chunk) * GROUPS + group)
            tma.async_copy_global_to_shared(word_rows, [block, column], full.index(s), place)


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
def multiply(
    x_scales, scales, zeros, bias, residual, out, parts, counters, x_ring, word_ring, full, empty, turns,
    rows, outputs, n_size, groups, steps, splits, items,
    BITS: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr,
    WHICH: gl.constexpr, R: gl.constexpr, M: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
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
        if EARLY:  # before anything else is read or written
            gdc_wait()
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
            if (
                GROUPS == 2 and PARTS == 2 and not WHOLE
            ):  # as measured; else the next group's products fill gaps between this one's
                acc = warpgroup_mma_wait(1, deps=[acc])
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
    STAGES: gl.constexpr, EARLY: gl.constexpr, x_scales, zeros, bias, residual, parts,
    counters, x_rows, word_rows, scales, out, x_ring, word_ring, full, empty, turns, rows, outputs, n_size, groups,
    steps, splits, items,
):  # fmt: skip
    """Multiply as one of the groups; the last part is to fetch."""
    PARTS: gl.constexpr = x_ring.shape[0] // STAGES
    if WHICH == GROUPS:
        fetch(
            x_rows, word_rows, x_ring, word_ring, full, empty, rows, steps, splits, items,
            PARTS, GROUPS, R, M, CHUNKS, STAGES, EARLY,
        )  # fmt: skip
    else:
        multiply(
            x_scales, scales, zeros, bias, residual, out, parts, counters, x_ring, word_ring, full, empty, turns,
            rows, outputs, n_size, groups, steps, splits, items,
            BITS, GROUP, ACTIVATION, GATED, GROUPS, WHICH, R, M, CHUNKS, SPLIT, STAGES, EARLY,
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
    EARLY: gl.constexpr,  # started while the kernel before it ends
    OWN: gl.constexpr,  # registers of a thread that multiplies
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
            which, BITS, GROUP, ACTIVATION, GATED, GROUPS, R, M, CHUNKS, SPLIT, STAGES, EARLY, x_scales,
            zeros, bias, residual, parts, counters, x_rows, word_rows, scales, out, x_ring, word_ring, full, empty,
            turns, rows, outputs, n_size, groups, steps, splits, items,
        )) for which in (0, 1, 2)], [4, 1], [OWN, 24])  # fmt: skip
    else:
        gl.warp_specialize([(take_part, (
            which, BITS, GROUP, ACTIVATION, GATED, GROUPS, R, M, CHUNKS, SPLIT, STAGES, EARLY, x_scales,
            zeros, bias, residual, parts, counters, x_rows, word_rows, scales, out, x_ring, word_ring, full, empty,
            turns, rows, outputs, n_size, groups, steps, splits, items,
        )) for which in (0, 1, 2, 3)], [4, 4, 1], [OWN, OWN, 24])  # fmt: skip
