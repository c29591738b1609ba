"""FlashAttention's backward pass for Hopper GPUs in Gluon; flash_hopper_kernels.py says how the warps share the work.

As in Triton (flash_triton_backward.py), one kernel holds queries and walks over the keys, the other one holds keys and
walks over the queries; both compute the probabilities again from the log-sum-exp. Each sum has a fixed order: the bits
are the same every time. Whole tiles only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hasten.ops.attention.flash_hopper_kernels import barrier


@gluon.jit
def fetch_keys(
    q_rows, d_out_rows, k_rows, v_rows, q_tiles, d_out_tiles, k_ring, v_ring,
    own_full, k_full, k_empty, v_full, v_empty, q_row, q_column, k_row, k_column, steps,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The program's queries with the gradients of their results, and its tiles of keys and values, the last first."""
    mbarrier.expect(own_full, 4 * q_rows.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(q_rows, [q_row + 64 * part, q_column], own_full, q_tiles.index(part))
        tma.async_copy_global_to_shared(d_out_rows, [q_row + 64 * part, q_column], own_full, d_out_tiles.index(part))
    for i in range(steps):
        s = i % STAGES
        phase = (i // STAGES) & 1
        row = k_row + (steps - 1 - i) * BLOCK_K
        mbarrier.wait(k_empty.index(s), phase ^ 1)
        mbarrier.expect(k_full.index(s), k_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(k_rows, [row, k_column], k_full.index(s), k_ring.index(s))
        mbarrier.wait(v_empty.index(s), phase ^ 1)
        mbarrier.expect(v_full.index(s), v_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(v_rows, [row, k_column], v_full.index(s), v_ring.index(s))


@gluon.jit
def gather_queries(
    dq_rows, log2_lse, delta, q_tile, d_out_tile, k_ring, v_ring, own_full, k_full, k_empty, v_full, v_empty,
    q_row, q_column, terms, position, steps, factor, scale,
    D: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The gradient of 64 queries, the first of which is at `position` among the keys."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    each_row: gl.constexpr = gl.SliceLayout(1, scores)
    rows = gl.arange(0, 64, each_row)
    lse = gl.load(log2_lse + terms + rows)
    term = gl.load(delta + terms + rows)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores))
    dq = gl.zeros([64, D], gl.float32, sums)
    mbarrier.wait(own_full, 0)
    for i in range(steps):
        s = i % STAGES
        phase = (i // STAGES) & 1
        first = (steps - 1 - i) * BLOCK_K
        nothing = gl.zeros([64, BLOCK_K], gl.float32, scores)
        mbarrier.wait(k_full.index(s), phase)
        coming = warpgroup_mma(q_tile, k_ring.index(s).permute([1, 0]), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(s), phase)
        later = warpgroup_mma(d_out_tile, v_ring.index(s).permute([1, 0]), nothing, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(1, deps=[coming])
        p = gl.exp2(x * factor - lse[:, None])
        if CAUSAL:  # noqa: SIM102 - what is not known while compiling has to be a condition of its own
            if first + BLOCK_K > position + 1:
                p = gl.where((position + rows)[:, None] >= (first + columns)[None, :], p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[later])
        mbarrier.arrive(v_empty.index(s), count=1)
        ds = p * (dp - term[:, None])
        half = gl.convert_layout(ds.to(dq_rows.dtype), weights)
        more = warpgroup_mma(half, k_ring.index(s), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[more])
        mbarrier.arrive(k_empty.index(s), count=1)
    q_tile.store((dq * scale).to(dq_rows.dtype))  # nobody reads the queries any more
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dq_rows, [q_row, q_column], q_tile)
    tma.store_wait(0)


@gluon.jit
def backward_queries(
    q_rows,  # descriptors: (B·T, H·D) in blocks of 64 rows of one head
    d_out_rows,
    dq_rows,
    k_rows,  # (B·S, Hkv·D) in tiles
    v_rows,
    log2_lse,  # (B, H, T)
    delta,
    queries,
    keys,
    factor,
    scale,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The gradients of 128 queries of a head a program, the longest first."""
    head = gl.program_id(1)
    b = gl.program_id(2)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    position = first + keys - queries
    stop = keys
    if CAUSAL:
        stop = gl.minimum(keys, position + 128)
    steps = (stop + BLOCK_K - 1) // BLOCK_K
    q_tiles = gl.allocate_shared_memory(q_rows.dtype, [2, 64, D], q_rows.layout)
    d_out_tiles = gl.allocate_shared_memory(q_rows.dtype, [2, 64, D], q_rows.layout)
    k_ring = gl.allocate_shared_memory(k_rows.dtype, [STAGES, BLOCK_K, D], k_rows.layout)
    v_ring = gl.allocate_shared_memory(v_rows.dtype, [STAGES, BLOCK_K, D], v_rows.layout)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    q_row = b * queries + first
    q_column = head * D
    k_row = b * keys
    k_column = head // GROUP * D
    terms = (b * H + head) * queries + first
    gl.warp_specialize(
        [
            (gather_queries, (
                dq_rows, log2_lse, delta, q_tiles.index(0), d_out_tiles.index(0), k_ring, v_ring,
                own_full, k_full, k_empty, v_full, v_empty, q_row, q_column, terms, position, steps, factor, scale,
                D, BLOCK_K, STAGES, CAUSAL,
            )),
            (gather_queries, (
                dq_rows, log2_lse, delta, q_tiles.index(1), d_out_tiles.index(1), k_ring, v_ring,
                own_full, k_full, k_empty, v_full, v_empty, q_row + 64, q_column, terms + 64, position + 64, steps,
                factor, scale, D, BLOCK_K, STAGES, CAUSAL,
            )),
            (fetch_keys, (
                q_rows, d_out_rows, k_rows, v_rows, q_tiles, d_out_tiles, k_ring, v_ring,
                own_full, k_full, k_empty, v_full, v_empty, q_row, q_column, k_row, k_column, steps, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def fetch_queries(
    q_rows, d_out_rows, k_rows, v_rows, q_ring, d_out_ring, k_tiles, v_tiles,
    own_full, q_full, q_empty, d_out_full, d_out_empty, q_row, q_column, k_row, k_column, start, steps,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The program's keys and values, and all tiles of queries that see them: head by head of those that share them."""
    mbarrier.expect(own_full, 4 * k_rows.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(k_rows, [k_row + 64 * part, k_column], own_full, k_tiles.index(part))
        tma.async_copy_global_to_shared(v_rows, [k_row + 64 * part, k_column], own_full, v_tiles.index(part))
    for i in range(steps * GROUP):
        s = i % STAGES
        phase = (i // STAGES) & 1
        row = q_row + start + i % steps * BLOCK_Q
        column = q_column + i // steps * D
        mbarrier.wait(q_empty.index(s), phase ^ 1)
        mbarrier.expect(q_full.index(s), q_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(q_rows, [row, column], q_full.index(s), q_ring.index(s))
        mbarrier.wait(d_out_empty.index(s), phase ^ 1)
        mbarrier.expect(d_out_full.index(s), d_out_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(d_out_rows, [row, column], d_out_full.index(s), d_out_ring.index(s))


@gluon.jit
def gather_gradients(
    dk_rows, dv_rows, log2_lse, delta, q_ring, d_out_ring, k_tile, v_tile,
    own_full, q_full, q_empty, d_out_full, d_out_empty, k_row, k_column, terms, queries, behind, start, steps,
    factor, scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys and values; everything is transposed, (keys, queries).

    behind: the first query that sees the first key, counted from the first query (negative: all do).
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_Q, 16]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    columns = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, scores))
    rows = behind + gl.arange(0, 64, gl.SliceLayout(1, scores))
    dk = gl.zeros([64, D], gl.float32, sums)
    dv = gl.zeros([64, D], gl.float32, sums)
    mbarrier.wait(own_full, 0)
    for i in range(steps * GROUP):
        s = i % STAGES
        phase = (i // STAGES) & 1
        first = start + i % steps * BLOCK_Q
        at = terms + i // steps * queries + first
        nothing = gl.zeros([64, BLOCK_Q], gl.float32, scores)
        mbarrier.wait(q_full.index(s), phase)
        coming = warpgroup_mma(k_tile, q_ring.index(s).permute([1, 0]), nothing, use_acc=False, is_async=True)
        lse = gl.load(log2_lse + at + columns)
        x = warpgroup_mma_wait(0, deps=[coming])
        mbarrier.wait(d_out_full.index(s), phase)
        coming = warpgroup_mma(v_tile, d_out_ring.index(s).permute([1, 0]), nothing, use_acc=False, is_async=True)
        p = gl.exp2(x * factor - lse[None, :])
        if CAUSAL:  # noqa: SIM102 - what is not known while compiling has to be a condition of its own
            if first < behind + 63:
                p = gl.where((first + columns)[None, :] >= rows[:, None], p, 0.0)
        half = gl.convert_layout(p.to(dk_rows.dtype), weights)
        more_dv = warpgroup_mma(half, d_out_ring.index(s), dv, is_async=True)
        if OVERLAP:
            term = gl.load(delta + at + columns)
            dp = warpgroup_mma_wait(1, deps=[coming])
        else:
            dp, dv = warpgroup_mma_wait(0, deps=[coming, more_dv])
            mbarrier.arrive(d_out_empty.index(s), count=1)
            term = gl.load(delta + at + columns)
        ds = p * (dp - term[None, :])
        half = gl.convert_layout(ds.to(dk_rows.dtype), weights)
        more_dk = warpgroup_mma(half, q_ring.index(s), dk, is_async=True)
        if OVERLAP:
            dv = warpgroup_mma_wait(1, deps=[more_dv])
            mbarrier.arrive(d_out_empty.index(s), count=1)
        dk = warpgroup_mma_wait(0, deps=[more_dk])
        mbarrier.arrive(q_empty.index(s), count=1)
    k_tile.store((dk * scale).to(dk_rows.dtype))  # nobody reads the keys and values any more
    v_tile.store(dv.to(dv_rows.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dk_rows, [k_row, k_column], k_tile)
    tma.async_copy_shared_to_global(dv_rows, [k_row, k_column], v_tile)
    tma.store_wait(0)


@gluon.jit
def backward_keys(
    q_rows,  # descriptors: (B·T, H·D) in tiles of one head
    d_out_rows,
    k_rows,  # (B·S, Hkv·D) in blocks of 64 rows of one head
    v_rows,
    dk_rows,
    dv_rows,
    log2_lse,  # (B, H, T)
    delta,
    queries,
    keys,
    factor,
    scale,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """The gradients of 128 keys and values of a head a program."""
    head = gl.program_id(1)
    b = gl.program_id(2)
    first = gl.program_id(0) * 128
    behind = first - (keys - queries)
    start = 0
    if CAUSAL:
        start = gl.maximum(behind, 0) // BLOCK_Q * BLOCK_Q
    steps = (queries - start) // BLOCK_Q
    q_ring = gl.allocate_shared_memory(q_rows.dtype, [STAGES, BLOCK_Q, D], q_rows.layout)
    d_out_ring = gl.allocate_shared_memory(q_rows.dtype, [STAGES, BLOCK_Q, D], d_out_rows.layout)
    k_tiles = gl.allocate_shared_memory(k_rows.dtype, [2, 64, D], k_rows.layout)
    v_tiles = gl.allocate_shared_memory(v_rows.dtype, [2, 64, D], v_rows.layout)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_out_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_out_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=2)
        mbarrier.init(d_out_full.index(s), count=1)
        mbarrier.init(d_out_empty.index(s), count=2)
    q_row = b * queries
    q_column = head * GROUP * D
    k_row = b * keys + first
    k_column = head * D
    terms = (b * H + head * GROUP) * queries
    gl.warp_specialize(
        [
            (gather_gradients, (
                dk_rows, dv_rows, log2_lse, delta, q_ring, d_out_ring, k_tiles.index(0), v_tiles.index(0),
                own_full, q_full, q_empty, d_out_full, d_out_empty, k_row, k_column, terms, queries, behind, start,
                steps, factor, scale, GROUP, D, BLOCK_Q, STAGES, CAUSAL, OVERLAP,
            )),
            (gather_gradients, (
                dk_rows, dv_rows, log2_lse, delta, q_ring, d_out_ring, k_tiles.index(1), v_tiles.index(1),
                own_full, q_full, q_empty, d_out_full, d_out_empty, k_row + 64, k_column, terms, queries, behind + 64,
                start, steps, factor, scale, GROUP, D, BLOCK_Q, STAGES, CAUSAL, OVERLAP,
            )),
            (fetch_queries, (
                q_rows, d_out_rows, k_rows, v_rows, q_ring, d_out_ring, k_tiles, v_tiles,
                own_full, q_full, q_empty, d_out_full, d_out_empty, q_row, q_column, k_row, k_column, start, steps,
                GROUP, D, BLOCK_Q, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
