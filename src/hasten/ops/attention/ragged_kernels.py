"""The Triton kernel of attention over a cache for any number of new tokens a sequence (ragged.py launches it).

A program takes a tile of queries of one sequence, for all query heads that share a key/value head, so that keys and
values are read once for them: row m of a tile is query m // GROUP, head m % GROUP of the group. Its keys may be split
among several programs; then the last one to finish adds the parts up. Scores are counted in powers of two.

An argument that is None is known to the compiler: what would use it is not there. Importing this file imports Triton.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(program, starts, sequences, QUERIES: tl.constexpr):
    """The sequence of a program, and which of its tiles: those of b begin at program starts[b] // QUERIES + b."""
    low = program * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle).to(tl.int32) // QUERIES + middle <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, program - (tl.load(starts + low).to(tl.int32) // QUERIES + low)


@triton.jit
def blocks_of(own_table, s, high, blocks, block_size, PAGE: tl.constexpr):
    """The blocks of the keys s (BLOCK,), which the loops ask for one tile ahead: a load that another one waits for."""
    index = s // PAGE if PAGE > 0 else s // block_size % blocks
    return tl.load(own_table + index, mask=s < high, other=0).to(tl.int64)


@triton.jit
def take_keys(
    peak,
    total,
    acc,
    held,  # (BLOCK,) blocks of these keys, where there is a table
    query,
    position,  # (M,) of the queries, -1 for rows that are none
    k,
    v,
    k_scales,
    v_scales,
    base,
    own_table,
    start,
    high,
    blocks,
    block_size,
    row_stride,
    factor,
    inner,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax (peak, total, acc) after one more tile of keys, and the blocks of the next one.

    MASKED: some of them may be hidden.
    """
    d = tl.arange(0, D_SIDE)
    s = start + tl.arange(0, BLOCK)
    there = s < high
    if own_table is not None:
        offset = s % PAGE if PAGE > 0 else s % block_size
        places = base + (held * block_size + offset) * row_stride
        held = blocks_of(own_table, s + BLOCK, high, blocks, block_size, PAGE)
    else:
        places = base + s.to(tl.int64) * row_stride
    at = places[:, None] + d[None, :]
    if MASKED:
        inside = there[:, None] & (d < D)[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)  # (BLOCK, D)
        value = tl.load(v + at, mask=inside, other=0.0)
    elif D != D_SIDE:
        key = tl.load(k + at, mask=(d < D)[None, :], other=0.0)
        value = tl.load(v + at, mask=(d < D)[None, :], other=0.0)
    else:
        key = tl.load(k + at)
        value = tl.load(v + at)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")  # (M, BLOCK)
    if k_scales is not None:
        scores = scores * tl.load(k_scales + (places + D) // 4, mask=there, other=0.0)[None, :]
    if inner is not None:
        scores = 1 - 2 / (1 + tl.exp2(scores * inner))  # tanh
    scores = scores * factor
    if MASKED:
        seen = (s[None, :] <= position[:, None]) & there[None, :]
        if WINDOW > 0:
            seen = seen & (position[:, None] - s[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # Nothing seen yet: exp(-inf - 0), not -inf + inf.
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    shrink = tl.exp2(peak - finite)
    p = tl.exp2(scores - finite[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    if v_scales is not None:
        p = p * tl.load(v_scales + (places + D) // 4, mask=there, other=0.0)[None, :]
    value = value.to(query.dtype)
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc, held


@triton.jit(do_not_specialize=["rows", "sequences", "blocks", "block_size", "slots"])  # one kernel for all steps
def attend(
    q,  # (N, H, D), rows at q_stride
    k,  # rows of head_dim values, at strides below
    v,
    k_scales,  # of int8 rows (cache_rows.py): the same memory as float32
    v_scales,
    starts,  # (B + 1,); None: row b is the only query of sequence b
    lengths,  # (B,)
    first,  # (B,)
    table,  # (B, blocks)
    out,  # (N, H, D)
    parts,  # (splits, N, H, D) float32
    peaks,  # (splits, N, H) float32: largest score
    sums,  # (splits, N, H) float32: of 2^(score - peak)
    counters,  # int32, zeros before and after: programs that are done with their part; None: `combine` comes behind
    rows,  # N
    sequences,
    blocks,
    block_size,
    slots,  # rows of the cache
    q_stride,
    row_stride,  # of k and v alike
    head_stride,
    factor,
    inner,  # of a soft-cap, else None
    WINDOW: tl.constexpr,  # 0: none
    GROUP: tl.constexpr,  # query heads of one key/value head
    QUERIES: tl.constexpr,  # of a tile
    M: tl.constexpr,  # rows of a tile, at least QUERIES · GROUP
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys at a time
    PAGE: tl.constexpr,  # block_size of a table that nobody goes through twice; 0: of another one
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,  # parts that are added up at once
):
    kv_head, split = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # causal rows get longer, and the longest go first
    if starts is None:
        b = program
        tile = program * 0
        begin = program
        count = tile + 1
    else:
        b, tile = sequence_of(program, starts, sequences, QUERIES)
        begin = tl.load(starts + b).to(tl.int32)
        count = tl.load(starts + b + 1).to(tl.int32) - begin
    if tile * QUERIES >= count:
        return
    m = tl.arange(0, M)
    d = tl.arange(0, D_SIDE)
    t = tile * QUERIES + m // GROUP
    real = (m < QUERIES * GROUP) & (t < count)
    row = begin + t
    head = kv_head * GROUP + m % GROUP
    inside = real[:, None] & (d < D)[None, :]
    query_at = row.to(tl.int64) * q_stride + head * D
    query = tl.load(q + query_at[:, None] + d[None, :], mask=inside, other=0.0)
    length = tl.load(lengths + b).to(tl.int32)
    nearest = length - count + tile * QUERIES  # position of the tile's first query
    furthest = tl.minimum(nearest + QUERIES, length) - 1
    position = tl.where(real, length - count + t, -1)
    base = kv_head.to(tl.int64) * head_stride
    high = furthest + 1
    if table is not None:
        own_table = table + b.to(tl.int64) * blocks
        if PAGE > 0:
            high = tl.minimum(high, blocks * PAGE)  # a length beyond the table is an error that must not spread
    else:
        own_table = None
        own_first = tl.load(first + b).to(tl.int64)
        base += own_first * row_stride
        # Rows that are padded on may seem longer than the cache.
        high = tl.minimum(high, (slots - own_first).to(tl.int32))
    low = tl.maximum(nearest * 0, 0)
    if WINDOW > 0:
        low = tl.maximum(nearest - WINDOW + 1, 0)
    low = low // BLOCK * BLOCK
    per = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK), tl.num_programs(2)) * BLOCK
    low += split * per
    stop = tl.minimum(low + per, high)
    whole = low  # keys before it are seen by all queries of the tile
    if WINDOW == 0:
        whole = tl.maximum(tl.minimum((nearest + 1) // BLOCK * BLOCK, stop // BLOCK * BLOCK), low)
    peak = tl.full((M,), float("-inf"), dtype=tl.float32)
    total = tl.full((M,), 0.0, dtype=tl.float32)
    acc = tl.full((M, D_SIDE), 0.0, dtype=tl.float32)
    held = low * 0
    if table is not None:
        held = blocks_of(own_table, low + tl.arange(0, BLOCK), stop, blocks, block_size, PAGE)
    for start in range(low, whole, BLOCK):
        peak, total, acc, held = take_keys(
            peak, total, acc, held, query, position, k, v, k_scales, v_scales, base, own_table, start, stop,
            blocks, block_size, row_stride, factor, inner, WINDOW, D, D_SIDE, BLOCK, PAGE, False,
        )  # fmt: skip
    for start in range(whole, stop, BLOCK):
        peak, total, acc, held = take_keys(
            peak, total, acc, held, query, position, k, v, k_scales, v_scales, base, own_table, start, stop,
            blocks, block_size, row_stride, factor, inner, WINDOW, D, D_SIDE, BLOCK, PAGE, True,
        )  # fmt: skip
    number = row.to(tl.int64) * heads + head  # of a query's head among N · H
    if not SPLIT:
        total = tl.where(total == 0.0, 1.0, total)  # a query that sees no key at all gets zeros
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + number[:, None] * D + d[None, :], result, mask=inside)
    else:
        every = tl.cast(rows, tl.int64) * heads  # of a part; where N is 1, Triton makes it a plain number
        place = split * every + number
        tl.store(peaks + place, peak, mask=real)
        tl.store(sums + place, total, mask=real)
        tl.store(parts + place[:, None] * D + d[None, :], acc, mask=inside)
        if counters is not None:
            tl.debug_barrier()
            counter = counters + program * tl.num_programs(1) + kv_head
            done = tl.atomic_add(counter, 1, sem="acq_rel")
            if done == tl.num_programs(2) - 1:
                tl.store(counter, 0)
                add_parts(out, parts, peaks, sums, number, every, real, tl.num_programs(2), M, CHUNK, D, D_SIDE)


@triton.jit
def add_parts(
    out,
    parts,
    peaks,
    sums,
    number,  # (ROWS,) of out's rows
    every,
    real,
    splits,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,  # parts that are read at once: one after the other, each would wait for memory
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
):
    """Rows `number` of out (N·H, D): the parts, weighted by what their scores were shifted by."""
    d = tl.arange(0, D_SIDE)
    c = tl.arange(0, CHUNK)
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.full((ROWS,), 0.0, dtype=tl.float32)
    acc = tl.full((ROWS, D_SIDE), 0.0, dtype=tl.float32)
    for start in range(0, splits, CHUNK):
        place = (start + c)[None, :] * every + number[:, None]  # (ROWS, CHUNK)
        there = real[:, None] & (start + c < splits)[None, :]
        # Other programs wrote these: read past this multiprocessor's own cache.
        own = tl.load(peaks + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part_sums = tl.load(sums + place, mask=there, other=0.0, cache_modifier=".cg")
        inside = there[:, :, None] & (d < D)[None, None, :]
        at = parts + place[:, :, None] * D + d[None, None, :]
        part = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")  # (ROWS, CHUNK, D_SIDE)
        new_peak = tl.maximum(peak, tl.max(own, axis=1))
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - finite)
        weight = tl.exp2(own - finite[:, None])
        total = total * shrink + tl.sum(weight * part_sums, axis=1)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * part, axis=1)
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + number[:, None] * D + d[None, :], result, mask=real[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["every", "splits"])
def combine(
    out,
    parts,
    peaks,
    sums,
    every,
    splits,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    D_SIDE: tl.constexpr,
):
    """What the last program of each tile does otherwise, in a launch of its own."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    add_parts(out, parts, peaks, sums, number, every, number < every, splits, ROWS, CHUNK, D, D_SIDE)
