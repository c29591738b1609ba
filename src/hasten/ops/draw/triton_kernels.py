"""Triton kernels of the draw: how far the scores of a row are kept, and the token that wins among them.

Importing this file imports Triton.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _key(x, zeros):
    """int32 ordered as the float32 x are. zeros: the number of their lower bits that are all zero."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> zeros


@triton.jit
def _value(key, zeros):
    """The float32 of a key."""
    return (tl.where(key < 0, key ^ (0x7FFFFFFF >> zeros), key) << zeros).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high, turn, zeros):
    """A key above low, at most high: halfway by value in the first turns, later by key."""
    middle = 0.5 * _value(low, zeros) + 0.5 * _value(high, zeros)
    by_value = tl.minimum(tl.maximum(_key(middle, zeros), low + 1), high)
    by_key = (low | high) - ((low ^ high) >> 1)  # rounded up
    return tl.where((turn < 8) & (tl.abs(middle) < float("inf")), by_value, by_key)


@triton.jit
def _search(x, masses, wanted, low, high, zeros):
    """The largest key between low and high with the wanted mass of x at or above it; low where there is none."""
    turn = 0
    while low < high:
        middle = _between(low, high, turn, zeros)
        enough = tl.sum(tl.where(x >= _value(middle, zeros), masses, 0.0), axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        turn += 1
    return low


@triton.jit
def _search_in_memory(row, vocab, wanted, low, high, top, rate, zeros, BLOCK: tl.constexpr):
    """`_search` of all of a row, at three keys a turn. A rate of 0 gives every logit the mass 1."""
    turn = 0
    while low < high:
        second = _between(low, high, turn, zeros)
        first, third = _between(low, second - 1, turn, zeros), _between(second, high, turn, zeros)
        a, b, c = _value(first, zeros), _value(second, zeros), _value(third, zeros)
        from_a, from_b, from_c = (
            tl.full((BLOCK,), 0.0, dtype=tl.float32),
            tl.full((BLOCK,), 0.0, dtype=tl.float32),
            tl.full((BLOCK,), 0.0, dtype=tl.float32),
        )
        for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=2):
            x = _logits(row, start, vocab, BLOCK)
            mass = tl.exp2((x - top) * rate)
            from_a += tl.where(x >= a, mass, 0.0)
            from_b += tl.where(x >= b, mass, 0.0)
            from_c += tl.where(x >= c, mass, 0.0)
        to_a, to_b, to_c = (
            tl.sum(from_a, axis=0) >= wanted,
            tl.sum(from_b, axis=0) >= wanted,
            tl.sum(from_c, axis=0) >= wanted,
        )
        high = tl.where(to_c, high, tl.where(to_b, third - 1, tl.where(to_a, second - 1, first - 1)))
        low = tl.where(to_c, third, tl.where(to_b, second, tl.where(to_a, first, low)))
        turn += 1
    return low


@triton.jit
def _logits(row, start, vocab, BLOCK: tl.constexpr):
    v = start + tl.arange(0, BLOCK)
    return tl.load(row + v, mask=v < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _scatter(places, x, mask, ON_GPU: tl.constexpr):
    """Store float32 x. `tl.store` would first bring them into another order, through shared memory."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [places.to(tl.int64), x, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(places, x, mask=mask)


@triton.jit
def _score(x, shift, temperature, HOT: tl.constexpr):
    """The scores of logits."""
    if HOT:
        x = tl.div_rn(x - shift, temperature)
    return x


@triton.jit
def cut(
    logits,  # (B, V), rows `stride` apart
    temperature,  # (B,) float32, or None
    top_k,  # (B,) int64, at least vocab: off; or None
    top_p,  # (B,) float32, 1: off; or None
    log_min_p,  # (B,) float32, or None
    shifts,  # (B,) float32, what is taken out of a row's logits before its temperature; or None
    least,  # (B,) float32, the smallest score that is kept; or None
    best,  # (B,) int64, made ready for `draw`; or None
    arrived,  # (B,) int32, likewise
    candidates,  # (B, ROOM) float32, or None where there is no top-k or top-p
    vocab,
    stride,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """How far the scores of each row are kept by top-k, then top-p, then min-p."""
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * stride
    if best is not None:
        tl.store(best + b, -9223372036854775808)
        tl.store(arrived + b, 0)
    if shifts is not None or least is not None:
        peaks = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        bits = tl.full((BLOCK,), 0, dtype=tl.int32)
        for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=4):
            x = _logits(row, start, vocab, BLOCK)
            peaks = tl.maximum(peaks, x)
            bits |= x.to(tl.int32, bitcast=True)
        peak = tl.max(peaks, axis=0)
        top = tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0)
        HOT: tl.constexpr = temperature is not None
        hot = 1.0
        if HOT:
            hot = tl.load(temperature + b)
            tl.store(shifts + b, top)
        limit = tl.full((), float("-inf"), dtype=tl.float32)  # of the logits
        if candidates is not None:
            k = vocab
            if top_k is not None:
                k = tl.minimum(tl.load(top_k + b), vocab).to(tl.int32)
            p = tl.full((), 1.0, dtype=tl.float32)
            if top_p is not None:
                p = tl.load(top_p + b)
            if (k < vocab) | (p < 1.0):
                rate = tl.minimum(1.4426950408889634 / hot, 3e38)  # finite: what is 0 stays 0
                room = candidates + b.to(tl.int64) * ROOM
                limit = _smallest_kept(row, vocab, peaks, bits, k, p, peak, top, rate, room, BLOCK, ROOM, ON_GPU)
        if least is not None:
            limit = _score(limit, top, hot, HOT)
            if log_min_p is not None:
                limit = tl.maximum(limit, _score(peak, top, hot, HOT) + tl.load(log_min_p + b))
            tl.store(least + b, limit)


@triton.jit
def _smallest_kept(
    row,
    vocab,
    peaks,  # (BLOCK,), the largest of the logits that each lane has
    bits,  # (BLOCK,), their bits joined by "or"
    k,
    p,
    peak,
    top,
    rate,  # a logit x has the mass 2 ** ((x - top) * rate)
    candidates,  # (ROOM,)
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The smallest logit of a row that top-k and then top-p keep.

    The k-th largest of the lanes' peaks is a bound with few logits above it. Those are gathered, and searched by
    bisection in registers. Where they are too many, or are not what top-p keeps, the whole row is searched.
    """
    # Logits that were made of 16-bit ones have keys of as many bits.
    zeros = tl.max(tl.where((bits & 0x1FFF) != 0, 2, tl.where((bits & 0xFFFF) != 0, 1, 0)), axis=0)
    zeros = tl.where(zeros == 0, 16, tl.where(zeros == 1, 13, 0))
    limit = tl.full((), float("-inf"), dtype=tl.float32)
    lowest, highest = _key(limit, zeros), _key(peak, zeros)
    few = k <= BLOCK
    lanes = tl.where(few, k, tl.where(vocab <= ROOM, BLOCK, BLOCK // 2)).to(tl.float32)
    bound = _search(peaks, tl.full((BLOCK,), 1.0, dtype=tl.float32), lanes, lowest, highest, zeros)
    floor = tl.maximum(_value(bound, zeros), -3.4028234663852886e38)
    counts = tl.full((BLOCK,), 0, dtype=tl.int32)
    masses = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=4):
        x = _logits(row, start, vocab, BLOCK)
        counts += (x >= floor).to(tl.int32)
        masses += tl.exp2((x - top) * rate)
    whole = tl.sum(masses, axis=0)
    count = tl.sum(counts, axis=0)
    found = (count <= ROOM) & (few | (k >= vocab))
    if found:
        at = tl.cumsum(counts, axis=0) - counts
        for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=4):
            x = _logits(row, start, vocab, BLOCK)
            _scatter(candidates + at, x, x >= floor, ON_GPU)
            at += (x >= floor).to(tl.int32)
        tl.debug_barrier()
        c = tl.arange(0, ROOM)
        x = tl.load(candidates + c, mask=c < count, other=float("-inf"))
        low = bound
        if k < vocab:
            low = _search(x, tl.full((ROOM,), 1.0, dtype=tl.float32), k.to(tl.float32), low, highest, zeros)
        if p < 1.0:
            mass = tl.where(x >= _value(low, zeros), tl.exp2((x - top) * rate), 0.0)
            held = tl.sum(mass, axis=0)
            if k < vocab:
                whole = held
            found = held >= p * whole
            if found:
                low = _search(x, mass, p * whole, low, highest, zeros)
        limit = _value(low, zeros)
    if not found:
        low = lowest
        if k < vocab:
            low = _search_in_memory(row, vocab, k.to(tl.float32), lowest, highest, top, 0.0, zeros, BLOCK)
        if p < 1.0:
            if k < vocab:
                whole = _mass_in_memory(row, vocab, _value(low, zeros), top, rate, BLOCK)
            # Logits so small that all of them could be left out.
            low = tl.maximum(low, _key(top + tl.log2(0.99 * (1.0 - p) * whole / vocab) / rate, zeros))
            low = _search_in_memory(row, vocab, p * whole, low, highest, top, rate, zeros, BLOCK)
        limit = _value(low, zeros)
    return limit


@triton.jit
def _mass_in_memory(row, vocab, least, top, rate, BLOCK: tl.constexpr):
    """The mass of a row's logits at or above `least`."""
    masses = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=4):
        x = _logits(row, start, vocab, BLOCK)
        masses += tl.where(x >= least, tl.exp2((x - top) * rate), 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _shifted(z, bits: tl.constexpr):
    """int64 z shifted to the right, zeros coming in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mixed(z, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """SplitMix64's finalizer."""
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


@triton.jit
def _log_of_exponential(u, ON_GPU: tl.constexpr):
    """log(-log(1 - u)) for float32 u in (0, 1), with full relative precision of the inner logarithm near 0."""
    if ON_GPU:
        found = libdevice.log(-libdevice.log1p(-u))
    else:  # of the interpreter
        w = 1.0 - u
        inner = tl.where(w == 1.0, u, u * tl.log(w) / (w - 1.0))
        found = tl.log(inner)
    return found


@triton.jit
def draw(
    logits,  # (B, V), rows `stride` apart
    seeds,  # (B,)
    steps,  # (B,)
    temperature,  # (B,) float32, or None
    greedy,  # (B,) bool, or None: no row
    shifts,  # (B,) float32, of `cut`
    least,  # (B,) float32, of `cut`; or None: all scores are kept
    best,  # (B,) int64, of `cut`
    arrived,  # (B,) int32, of `cut`
    tokens,  # (B,)
    vocab,
    stride,
    tiles,  # that a program looks at
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ON_GPU: tl.constexpr,
    DRAWN: tl.constexpr,  # False: all rows are greedy
    BLOCK: tl.constexpr,
):
    """argmax of score - log E of those that are kept, E exponential noise of seed, step and token (`reference_draw`).

    Several programs share a row; the one that comes last stores the token.
    """
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * stride
    first = tl.program_id(1) * tiles * BLOCK
    HOT: tl.constexpr = temperature is not None
    noisy = DRAWN
    if greedy is not None:
        noisy = tl.load(greedy + b) == 0
    hot, shift, limit = 1.0, 0.0, float("-inf")
    if HOT:
        hot, shift = tl.load(temperature + b), tl.load(shifts + b)
    if least is not None:
        limit = tl.load(least + b)
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    token = first + tl.arange(0, BLOCK)
    if noisy:
        key = _mixed(tl.load(seeds + b), FIRST, SECOND) + tl.load(steps + b) * GOLDEN
        key = _mixed(key, FIRST, SECOND)
        for tile in range(tiles):
            start = first + tile * BLOCK
            v = start + tl.arange(0, BLOCK)
            s = _score(_logits(row, start, vocab, BLOCK), shift, hot, HOT)
            any_kept = True
            if least is not None:
                s = tl.where(s >= limit, s, float("-inf"))
                any_kept = tl.max(s, axis=0) > float("-inf")
            if any_kept:
                bits = _shifted(_mixed(key + (v + 1).to(tl.int64) * GOLDEN, FIRST, SECOND), 11)
                u = bits.to(tl.float32) * 1.1102230246251565e-16  # 2**-53
                u = tl.minimum(tl.maximum(u, 5.551115123125783e-17), 0.999999940395355224609375)  # 2**-54, 1 - 2**-24
                race = s - _log_of_exponential(u, ON_GPU)
                better = race > most  # the first among equals stays
                most = tl.where(better, race, most)
                token = tl.where(better, v, token)
    else:
        for tile in range(tiles):
            start = first + tile * BLOCK
            x = _logits(row, start, vocab, BLOCK)
            better = x > most
            most = tl.where(better, x, most)
            token = tl.where(better, start + tl.arange(0, BLOCK), token)
    peak = tl.max(most, axis=0)
    found = tl.min(tl.where(most == peak, token, 0x7FFFFFFF), axis=0)
    peak = tl.where(peak == 0.0, 0.0, peak)  # -0.0 is no less
    packed = (_key(peak, 0).to(tl.int64) << 32) + (0x7FFFFFFF - found)
    tl.atomic_max(best + b, packed, sem="acq_rel")
    if tl.atomic_add(arrived + b, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        packed = tl.atomic_max(best + b, packed, sem="acq_rel")
        tl.store(tokens + b, 0x7FFFFFFF - (packed & 0x7FFFFFFF))
