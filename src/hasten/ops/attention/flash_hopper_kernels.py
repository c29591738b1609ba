"""FlashAttention's forward pass for Hopper GPUs in Gluon, Triton's lower level (FlashAttention-3, arXiv 2407.08608).

The warps of a program have different work. One warp fetches: the copy engine (TMA) brings tiles of keys and values into
a ring in shared memory, and barriers there say which are full and which empty. Two warp groups compute 64 queries each.
Nothing else keeps the two in step, so that one multiplies while the other one computes its softmax. With AHEAD a group
also has the scores of its next tile multiplied while it computes the softmax of this one.

Whole tiles only: a causal row sees at least its own key, and every length is a multiple of the tile.
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

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name up to Triton 3.6, and from 3.7 on
LOWEST = gl.constexpr(-1e30)  # a maximum of nothing, finite: -inf - -inf would be NaN
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def fetch(
    q_rows, k_rows, v_rows, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
    q_row, q_column, k_row, k_column, steps,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The program's queries, and its tiles of keys and values from the last to the first."""
    mbarrier.expect(q_full, 2 * q_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(q_rows, [q_row, q_column], q_full, q_tiles.index(0))
    tma.async_copy_global_to_shared(q_rows, [q_row + 64, q_column], q_full, q_tiles.index(1))
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
def softmax(x, peak, total, rows, columns, first, position, factor, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr):
    """Probabilities not yet divided, the running maximum and sum, and by what earlier sums shrink."""
    if CAUSAL:  # noqa: SIM102 - what is not known while compiling has to be a condition of its own
        if first + BLOCK_K > position + 1:  # the tile reaches beyond the first row's key
            x = gl.where(rows[:, None] >= (first + columns)[None, :], x, float("-inf"))
    higher = gl.maximum(peak, gl.max(x, axis=1) * factor)
    p = gl.exp2(x * factor - higher[:, None])
    shrink = gl.exp2(peak - higher)
    return p, higher, total * shrink + gl.sum(p, axis=1), shrink


@gluon.jit
def attend(
    out_rows, lse, q_tile, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
    out_row, out_column, lse_row, position, steps, factor,
    D: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """64 queries, the first of which is at `position` among the keys, over all tiles of keys."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    each_row: gl.constexpr = gl.SliceLayout(1, scores)
    peak = gl.full([64], LOWEST, gl.float32, each_row)
    total = gl.full([64], 0.0, gl.float32, each_row)
    acc = gl.zeros([64, D], gl.float32, sums)
    rows = position + gl.arange(0, 64, each_row)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores))
    mbarrier.wait(q_full, 0)
    if AHEAD:
        mbarrier.wait(k_full.index(0), 0)
        nothing = gl.zeros([64, BLOCK_K], gl.float32, scores)
        coming = warpgroup_mma(q_tile, k_ring.index(0).permute([1, 0]), nothing, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[coming])
        mbarrier.arrive(k_empty.index(0), count=1)
        for i in range(steps - 1):
            s = i % STAGES
            n = (i + 1) % STAGES
            first = (steps - 1 - i) * BLOCK_K
            nothing = gl.zeros([64, BLOCK_K], gl.float32, scores)
            mbarrier.wait(k_full.index(n), ((i + 1) // STAGES) & 1)
            coming = warpgroup_mma(q_tile, k_ring.index(n).permute([1, 0]), nothing, use_acc=False, is_async=True)
            p, peak, total, shrink = softmax(x, peak, total, rows, columns, first, position, factor, BLOCK_K, CAUSAL)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
            half = gl.convert_layout(p.to(out_rows.dtype), weights)
            mbarrier.wait(v_full.index(s), (i // STAGES) & 1)
            added = warpgroup_mma(half, v_ring.index(s), acc, is_async=True)
            x = warpgroup_mma_wait(1, deps=[coming])
            mbarrier.arrive(k_empty.index(n), count=1)
            acc = warpgroup_mma_wait(0, deps=[added])
            mbarrier.arrive(v_empty.index(s), count=1)
        last = (steps - 1) % STAGES
        p, peak, total, shrink = softmax(x, peak, total, rows, columns, 0, position, factor, BLOCK_K, CAUSAL)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
        half = gl.convert_layout(p.to(out_rows.dtype), weights)
        mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
        added = warpgroup_mma(half, v_ring.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[added])
    else:
        for i in range(steps):
            s = i % STAGES
            phase = (i // STAGES) & 1
            first = (steps - 1 - i) * BLOCK_K
            nothing = gl.zeros([64, BLOCK_K], gl.float32, scores)
            mbarrier.wait(k_full.index(s), phase)
            coming = warpgroup_mma(q_tile, k_ring.index(s).permute([1, 0]), nothing, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[coming])
            mbarrier.arrive(k_empty.index(s), count=1)
            p, peak, total, shrink = softmax(x, peak, total, rows, columns, first, position, factor, BLOCK_K, CAUSAL)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
            half = gl.convert_layout(p.to(out_rows.dtype), weights)
            mbarrier.wait(v_full.index(s), phase)
            added = warpgroup_mma(half, v_ring.index(s), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[added])
            mbarrier.arrive(v_empty.index(s), count=1)
    result = acc / gl.convert_layout(total, gl.SliceLayout(1, sums))[:, None]
    q_tile.store(result.to(out_rows.dtype))  # nobody reads the queries any more
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out_rows, [out_row, out_column], q_tile)
    gl.store(lse + lse_row + gl.arange(0, 64, each_row), (peak + gl.log2(total)) * LN_2)
    tma.store_wait(0)


@gluon.jit
def forward(
    q_rows,  # descriptors: (B·T, H·D) in blocks of 64 rows of one head
    k_rows,  # (B·S, Hkv·D) in tiles
    v_rows,
    out_rows,
    lse,  # (B, H, T)
    queries,
    keys,
    factor,  # scale · log2(e)
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """128 queries of a head a program, the longest first."""
    head = gl.program_id(1)
    b = gl.program_id(2)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    position = first + keys - queries
    stop = keys
    if CAUSAL:
        stop = gl.minimum(keys, position + 128)
    steps = (stop + BLOCK_K - 1) // BLOCK_K
    q_tiles = gl.allocate_shared_memory(q_rows.dtype, [2, 64, D], q_rows.layout)
    k_ring = gl.allocate_shared_memory(k_rows.dtype, [STAGES, BLOCK_K, D], k_rows.layout)
    v_ring = gl.allocate_shared_memory(v_rows.dtype, [STAGES, BLOCK_K, D], v_rows.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)  # both groups have read it
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    q_row = b * queries + first
    q_column = head * D
    k_row = b * keys
    k_column = head // GROUP * D
    lse_row = (b * H + head) * queries + first
    gl.warp_specialize(
        [
            (attend, (
                out_rows, lse, q_tiles.index(0), k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
                q_row, q_column, lse_row, position, steps, factor, D, BLOCK_K, STAGES, CAUSAL, AHEAD,
            )),
            (attend, (
                out_rows, lse, q_tiles.index(1), k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
                q_row + 64, q_column, lse_row + 64, position + 64, steps, factor, D, BLOCK_K, STAGES, CAUSAL, AHEAD,
            )),
            (fetch, (
                q_rows, k_rows, v_rows, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
                q_row, q_column, k_row, k_column, steps, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],  # warps of the second group and of the one that fetches
        [232, 24],  # registers of a thread: those that fetching leaves are the groups'
    )  # fmt: skip
