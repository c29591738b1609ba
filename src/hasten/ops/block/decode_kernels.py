"""A decode step's blocks in one launch, for one row in 16 bits, in Gluon for Hopper GPUs.

The programs stay: one a multiprocessor, each with its own rows of every matrix. All of them wait for each other between
the phases of a layer, which are: norm + q, k, v | rotary turn, cache write, attention | output + residual | norm +
gate, up, activation | down + residual. What keeps the memory busy meanwhile is a ring in shared memory: weights depend
on nothing, so their tiles are asked for STAGES - 1 ahead, across phases and layers, whatever a program waits for.
Importing this file imports Triton.
"""

# Tuples of tensors grow in unrolled loops.
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hasten.ops.block.decode_products import OFFSETS, ask, in_product_order, multiply, places_in

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name up to Triton 3.6, and from 3.7 on
SPINS = gl.constexpr(1 << 20)  # about a second


@gluon.constexpr_function
def row_layout(size, warps):
    """Where threads have a row of `size` numbers."""
    return gl.BlockedLayout([max(1, size // (32 * warps))], [32], [warps], [0])


@gluon.constexpr_function
def places_of(size, KT):
    """Places in shared memory of `size` features: what tiles multiply, of which the last may be longer than a row."""
    return (size + 2 * KT - 1) // (2 * KT) * (2 * KT)


@gluon.constexpr_function
def key_layout(size, warps):
    """Where threads have keys (KEYS, size): 16 bytes of a key each."""
    lanes = min(32, size // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def wait_for_all(counter, target):
    """Wait until all programs are here. They have to run at the same time (a cooperative launch)."""
    barrier()  # all threads have stored before one of them counts
    seen = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    spins = 0
    while (seen < target) & (spins < SPINS):
        seen = gl.atomic_add(counter, 0, sem="acquire")
        spins += 1
    if spins >= SPINS:  # an error of this kernel: an exception of CUDA's instead of waiting for ever
        gl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [seen], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gains_of(half, at, SIZE: gl.constexpr, KT: gl.constexpr, XT: gl.constexpr):
    """A norm's weights, XT at a time: asked for before the wait for what is normed."""
    layout: gl.constexpr = row_layout(XT, gl.num_warps())
    found = ()
    for part in gl.static_range((places_of(SIZE, KT) + XT - 1) // XT):
        k = part * XT + gl.arange(0, XT, layout)
        found = found + (gl.load(half + at * 8 + k, mask=k < SIZE, other=0.0),)  # noqa: RUF005
    return found


@gluon.jit
def take_normed(xs, x, gains, eps, offset, SIZE: gl.constexpr, KT: gl.constexpr, XT: gl.constexpr):
    """xs = x times the norm's weights; returns 1 / rms of x, which is applied to the products."""
    layout: gl.constexpr = row_layout(XT, gl.num_warps())
    squares = gl.zeros([XT], gl.float32, layout)
    found = ()
    for part in gl.static_range((places_of(SIZE, KT) + XT - 1) // XT):
        k = part * XT + gl.arange(0, XT, layout)
        own = gl.load(x + k, mask=k < SIZE, other=0.0, cache_modifier=".cg")
        squares += own * own
        found = found + (own * (gains[part].to(gl.float32) + offset),)  # noqa: RUF005
    put(xs, found, KT)
    return gl.rsqrt(gl.sum(squares, axis=0) / SIZE + eps)


@gluon.jit
def put(xs, values, KT: gl.constexpr):
    """xs = values, some at a time."""
    for part in gl.static_range(len(values)):
        xs.index(part).store(in_product_order(values[part], KT))


@gluon.jit
def take(xs, x, SIZE: gl.constexpr, KT: gl.constexpr, XT: gl.constexpr):
    """xs = x."""
    layout: gl.constexpr = row_layout(XT, gl.num_warps())
    found = ()
    for part in gl.static_range((places_of(SIZE, KT) + XT - 1) // XT):
        k = part * XT + gl.arange(0, XT, layout)
        own = gl.load(x + k, mask=k < SIZE, other=0.0, cache_modifier=".cg")
        found = found + (own.to(gl.float32),)  # noqa: RUF005
    put(xs, found, KT)


@gluon.jit
def take_attended(
    xs, parts, peaks, sums, HEADS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr,
    KT: gl.constexpr, XT: gl.constexpr,
):  # fmt: skip
    """xs = what the queries see, out of the parts of each head's keys."""
    layout: gl.constexpr = row_layout(XT, gl.num_warps())
    SIZE: gl.constexpr = HEADS * D
    found = ()
    for part in gl.static_range((places_of(SIZE, KT) + XT - 1) // XT):
        k = part * XT + gl.arange(0, XT, layout)
        inside = k < SIZE
        highest = gl.full([XT], float("-inf"), gl.float32, layout)
        own_peaks = ()
        for split in gl.static_range(SPLITS):
            peak = gl.load(peaks + split * HEADS + k // D, mask=inside, other=0.0, cache_modifier=".cg")
            own_peaks = own_peaks + (peak,)  # noqa: RUF005
            highest = gl.maximum(highest, peak)
        total = gl.zeros([XT], gl.float32, layout)
        seen = gl.zeros([XT], gl.float32, layout)
        for split in gl.static_range(SPLITS):
            share = gl.exp2(own_peaks[split] - highest)
            share *= gl.load(sums + split * HEADS + k // D, mask=inside, other=0.0, cache_modifier=".cg")
            own = gl.load(parts + split * SIZE + k, mask=inside, other=0.0, cache_modifier=".cg")
            total += share
            seen += share * own.to(gl.float32)
        found = found + (gl.where(inside, seen / total, 0.0),)  # noqa: RUF005
    put(xs, found, KT)


@gluon.jit
def turned(head, weight, cos, sin, eps, offset, NORMED: gl.constexpr, HALF: gl.constexpr, D: gl.constexpr):
    """A head of q or k (D,), normed and turned, in float32. weight (D,): of the norm."""
    layout: gl.constexpr = gl.SliceLayout(0, key_layout(D, gl.num_warps()))
    d = gl.arange(0, D, layout)
    near = d < 2 * HALF
    other = gl.where(d < HALF, d + HALF, d - HALF)  # the element that one is turned with
    angle = gl.where(d < HALF, d, d - HALF)
    y = gl.load(head + d, cache_modifier=".cg").to(gl.float32)
    partner = gl.load(head + other, mask=near, other=0.0, cache_modifier=".cg").to(gl.float32)
    if NORMED:
        inverse = gl.rsqrt(gl.sum(y * y, axis=0) / D + eps)
        y = y * inverse * (gl.load(weight + d).to(gl.float32) + offset)
        partner = partner * inverse * (gl.load(weight + other, mask=near, other=0.0).to(gl.float32) + offset)
    c = gl.load(cos + angle, mask=near, other=1.0)
    s = gl.load(sin + angle, mask=near, other=0.0)
    return y * c + partner * gl.where(d < HALF, -s, s)


@gluon.jit
def rows_at(
    half, base, first, pages, start, stop, row_stride, KEYS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Keys or values from position `start` on, below `stop`: (KEYS, D)."""
    layout: gl.constexpr = key_layout(D, gl.num_warps())
    row = start + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    inside = row < stop
    if PAGE > 0:
        row = gl.load(pages + row // PAGE, mask=inside, other=0).to(gl.int64) * PAGE + row % PAGE
    else:
        row = row + first
    places = base + (row.to(gl.int64) * row_stride)[:, None] + d[None, :]
    return gl.load(half + places, mask=inside[:, None], other=0.0)


@gluon.jit
def ask_for_rows(half, base, first, pages, low, stop, row_stride, D: gl.constexpr, PAGE: gl.constexpr):
    """Ask for keys or values from position `low` on, below `stop`, in the L2 cache: before others wait for memory."""
    SIZE: gl.constexpr = 32 * gl.num_warps()
    i = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for at in range(low, stop, SIZE):
        row = gl.minimum(at + i, stop - 1)
        if PAGE > 0:  # noqa: SIM108 - what is not compiled must not be seen
            row = gl.load(pages + row // PAGE).to(gl.int64) * PAGE + row % PAGE
        else:
            row = row + first
        for line in gl.static_range(D // 64):
            places = half + (base + row.to(gl.int64) * row_stride + line * 64)
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=gl.int32, is_pure=False, pack=1
            )


@gluon.jit
def attend(
    half, own_table, qkv, cos, sin, k_base, v_base, k, v, low, stop, start, pages, new_row, row_stride, parts, peaks,
    sums, eps, offset, factor, NORMED: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    HALF: gl.constexpr, SPLITS: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """One head's query over one part of its keys, the first of which are in k and v; part 0 begins with the new one."""
    layout: gl.constexpr = key_layout(D, gl.num_warps())
    wide: gl.constexpr = gl.SliceLayout(0, layout)
    tall: gl.constexpr = gl.SliceLayout(1, layout)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    dtype: gl.constexpr = qkv.dtype.element_ty
    head = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    kv_head = head // GROUP
    d = gl.arange(0, D, wide)
    row = gl.arange(0, KEYS, tall)
    q_weight, k_weight = half, half
    if NORMED:
        q_weight, k_weight = half + gl.load(own_table + 9) * 8, half + gl.load(own_table + 10) * 8
    query = turned(qkv + head * D, q_weight, cos, sin, eps, offset, NORMED, HALF, D).to(dtype).to(gl.float32)
    new_key = turned(qkv + (HEADS + kv_head) * D, k_weight, cos, sin, eps, offset, NORMED, HALF, D).to(dtype)
    new_value = gl.load(qkv + (HEADS + KV_HEADS + kv_head) * D + d, cache_modifier=".cg")
    writes = (split == 0) & (head % GROUP == 0) & (new_row >= 0)
    gl.store(half + k_base + new_row * row_stride + d, new_key, mask=(d >= 0) & writes)
    gl.store(half + v_base + new_row * row_stride + d, new_value, mask=(d >= 0) & writes)
    begins = split == 0
    peak = gl.where(begins, gl.sum(query * new_key.to(gl.float32), axis=0) * factor, float("-inf"))
    total = gl.where((row == 0) & begins, 1.0, 0.0)
    acc = gl.where(((row == 0) & begins)[:, None], new_value.to(gl.float32)[None, :], 0.0)
    for at in range(low, stop, KEYS):
        own_k, own_v = k, v
        k = rows_at(half, k_base, start, pages, at + KEYS, stop, row_stride, KEYS, D, PAGE)
        v = rows_at(half, v_base, start, pages, at + KEYS, stop, row_stride, KEYS, D, PAGE)
        scores = gl.sum(own_k.to(gl.float32) * query[None, :], axis=1) * factor
        scores = gl.where(at + row < stop, scores, float("-inf"))
        highest = gl.maximum(peak, gl.max(scores, axis=0))
        shares = gl.exp2(scores - highest)
        keep = gl.exp2(peak - highest)
        acc = acc * keep + shares[:, None] * own_v.to(gl.float32)
        total = total * keep + shares
        peak = highest
    place = split * HEADS + head
    whole = gl.sum(total, axis=0)
    gl.store(peaks + place, peak)
    gl.store(sums + place, whole)
    gl.store(parts + place * D + d, (gl.sum(acc, axis=0) / gl.where(whole > 0.0, whole, 1.0)).to(dtype))


@gluon.jit(do_not_specialize=["layers", "slots", "blocks"])  # one kernel for all steps
def decode_layers(
    x,  # (HIDDEN,) float32: the residual stream, in and out
    w,  # the first matrix as words: what the others are counted from in the table, in 16 bytes
    half,  # the same of the norms' weights, keys and values
    table,  # (layers, 16) int64: four matrices, two norms, k, v, qkv's bias, norms of q and k, zeros
    qkv,  # (QKV,) as keys and values
    parts,  # (SPLITS, HEADS, D) as keys and values
    peaks,  # (SPLITS, HEADS) float32
    sums,
    inner,  # (INNER,) as keys and values
    cos,  # (HALF,) float32
    sin,
    slot_mapping,  # (1,) the cache's row of the new token, -1: nowhere
    lengths,  # (1,) with it
    first,  # (1,) the cache's row of the first token, or None
    pages,  # (blocks,) the cache's blocks of PAGE rows, or None
    counter,  # 0: of arrivals
    layers,
    slots,  # rows of the cache
    blocks,
    row_stride,
    head_stride,
    eps,
    offset,
    factor,
    HIDDEN: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    INNER: gl.constexpr,
    HALF: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORMED: gl.constexpr,  # heads of q and k are
    BIASED: gl.constexpr,  # qkv has a bias
    ACROSS: gl.constexpr,  # warps next to each other that have rows of their own
    R: gl.constexpr,  # rows of a tile
    KT: gl.constexpr,  # words of a row
    XT: gl.constexpr,  # numbers of x that are put in shared memory at a time
    STAGES: gl.constexpr,  # tiles of the ring
    SPLITS: gl.constexpr,  # parts of a head's keys
    KEYS: gl.constexpr,  # at a time
    PAGE: gl.constexpr,  # rows of a block of the cache; 0: it has none
):
    ATTENDED: gl.constexpr = HEADS * D
    QKV: gl.constexpr = (HEADS + 2 * KV_HEADS) * D
    PIECES: gl.constexpr = (places_of(max(HIDDEN, ATTENDED, INNER), KT) + XT - 1) // XT
    programs = gl.num_programs(0)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(w.dtype.element_ty, [STAGES, R, KT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    staged = gl.allocate_shared_memory(gl.float32, [PIECES, XT], flat)
    xs = staged._reinterpret(gl.float32, [PIECES * XT // KT, KT], flat)
    item = 0
    end = layers * 4
    block = gl.program_id(0)
    step = 0
    slot = 0
    at = gl.load(table)
    starts, _ = places_in(item & 3, block, QKV, HIDDEN, ATTENDED, INNER, ACROSS, R)
    for s in gl.static_range(STAGES - 1):
        at, starts, item, block, step = ask(
            ring, s, w, table, at, starts, item, block, step, end, programs, QKV, HIDDEN, ATTENDED, INNER, ACROSS,
            R, KT,
        )  # fmt: skip
    length = gl.load(lengths).to(gl.int32)
    start = 0
    old = length - 1
    if PAGE > 0:
        old = gl.minimum(old, blocks * PAGE)  # a length beyond the table is an error that must not spread
    else:
        start = gl.load(first)
        old = gl.minimum(old, (slots - start).to(gl.int32))
    new_row = gl.load(slot_mapping)
    part = gl.program_id(0) % SPLITS
    low = old * part // SPLITS
    stop = old * (part + 1) // SPLITS
    attends = gl.program_id(0) < HEADS * SPLITS
    kv_head = gl.minimum(gl.program_id(0) // (SPLITS * (HEADS // KV_HEADS)), KV_HEADS - 1)
    first_key = kv_head.to(gl.int64) * head_stride
    arrivals = 0
    for layer in range(layers):
        own = table + layer * OFFSETS
        k_base = gl.load(own + 6) * 8 + first_key
        v_base = gl.load(own + 7) * 8 + first_key
        ask_for_rows(half, k_base, start, pages, low, stop, row_stride, D, PAGE)
        ask_for_rows(half, v_base, start, pages, low, stop, row_stride, D, PAGE)
        gains = gains_of(half, gl.load(own + 4), HIDDEN, KT, XT)
        if layer > 0:
            arrivals += programs
            wait_for_all(counter, arrivals)
        scale = take_normed(staged, x, gains, eps, offset, HIDDEN, KT, XT)
        slot, at, starts, item, block, step = multiply(
            xs, scale, x, qkv, inner, ring, slot, w, half, table, own, at, starts, item, block,
            step, end, programs, 0, QKV, HIDDEN, ACTIVATION, BIASED, QKV, HIDDEN, ATTENDED, INNER,
            ACROSS, R, KT, STAGES,
        )  # fmt: skip
        k = rows_at(half, k_base, start, pages, low, stop, row_stride, KEYS, D, PAGE)
        v = rows_at(half, v_base, start, pages, low, stop, row_stride, KEYS, D, PAGE)
        arrivals += programs
        wait_for_all(counter, arrivals)
        if attends:
            attend(
                half, own, qkv, cos, sin, k_base, v_base, k, v, low, stop, start, pages, new_row, row_stride, parts,
                peaks, sums, eps, offset, factor, NORMED, HEADS, KV_HEADS, D, HALF, SPLITS, KEYS, PAGE,
            )  # fmt: skip
        arrivals += programs
        wait_for_all(counter, arrivals)
        take_attended(staged, parts, peaks, sums, HEADS, D, SPLITS, KT, XT)
        slot, at, starts, item, block, step = multiply(
            xs, 1.0, x, qkv, inner, ring, slot, w, half, table, own, at, starts, item, block,
            step, end, programs, 1, HIDDEN, ATTENDED, ACTIVATION, BIASED, QKV, HIDDEN, ATTENDED, INNER,
            ACROSS, R, KT, STAGES,
        )  # fmt: skip
        gains = gains_of(half, gl.load(own + 5), HIDDEN, KT, XT)
        arrivals += programs
        wait_for_all(counter, arrivals)
        scale = take_normed(staged, x, gains, eps, offset, HIDDEN, KT, XT)
        slot, at, starts, item, block, step = multiply(
            xs, scale, x, qkv, inner, ring, slot, w, half, table, own, at, starts, item, block,
            step, end, programs, 2, 2 * INNER, HIDDEN, ACTIVATION, BIASED, QKV, HIDDEN, ATTENDED, INNER,
            ACROSS, R, KT, STAGES,
        )  # fmt: skip
        arrivals += programs
        wait_for_all(counter, arrivals)
        take(staged, inner, INNER, KT, XT)
        slot, at, starts, item, block, step = multiply(
            xs, 1.0, x, qkv, inner, ring, slot, w, half, table, own, at, starts, item, block,
            step, end, programs, 3, HIDDEN, INNER, ACTIVATION, BIASED, QKV, HIDDEN, ATTENDED, INNER,
            ACROSS, R, KT, STAGES,
        )  # fmt: skip
    async_copy.wait_group(0)
    barrier()
    if gl.atomic_add(counter, 1, sem="acq_rel") == arrivals + programs - 1:  # the last one: for the next launch
        gl.store(counter, 0)
