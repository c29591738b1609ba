"""Triton kernels around a decode step's forward pass; importing this file imports Triton.

Before it, the places of its tokens; behind it, the draw: how far the scores of a row are kept, the token that wins, and
the batch moved on by it.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def place(
    lengths,  # (S,) tokens of each sequence after the step, 0: padding
    counts,  # (S,) of them, those that are new
    table,  # (S, columns) block numbers
    positions,  # (S, W)
    slots,  # (S, W)
    seq_lens,  # (S,) as if all W tokens were there
    columns,
    block_size,
    W: tl.constexpr,
):
    s = tl.program_id(0)
    w = tl.arange(0, W)
    length, count = tl.load(lengths + s), tl.load(counts + s)
    start = length - count
    position = tl.maximum(tl.minimum(start + w, length - 1), 0)
    block = tl.load(table + s * columns + position // block_size)
    there = (w < count) & (length > 0)
    tl.store(positions + s * W + w, position)
    tl.store(slots + s * W + w, tl.where(there, block * block_size + position % block_size, -1))
    tl.store(seq_lens + s, tl.where(length > 0, start + W, 0))


@triton.jit
def move_on(drawn, tokens, lengths, steps, size, BLOCK: tl.constexpr):
    """The tokens that were drawn are the next step's, of the rows that are no padding."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < size
    length = tl.load(lengths + s, mask=inside, other=0)
    going = (length > 0).to(tl.int64)
    tl.store(tokens + s, tl.load(drawn + s, mask=inside, other=0) * going, mask=inside)
    tl.store(lengths + s, length + going, mask=inside)
    tl.store(steps + s, tl.load(steps + s, mask=inside, other=0) + going, mask=inside)


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
def _log_of_exponential(u, ACCURATE: tl.constexpr):
    """log(-log(1 - u)) for float32 u in (0, 1), with full relative precision of the inner logarithm near 0."""
    if ACCURATE:
        found = libdevice.log(-libdevice.log1p(-u))
    else:  # of the interpreter
        w = 1.0 - u
        inner = tl.where(w == 1.0, u, u * tl.log(w) / (w - 1.0))
        found = tl.log(inner)
    return found


@triton.jit
def draw(
    scores,  # (B, V) float32, rows `stride` apart
    seeds,  # (B,)
    steps,  # (B,)
    tokens,  # (B,)
    vocab,
    stride,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ACCURATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`reference_draw`: argmax of score - log E, E exponential noise of seed, step and token."""
    b = tl.program_id(0)
    key = _mixed(tl.load(seeds + b), FIRST, SECOND) + tl.load(steps + b) * GOLDEN
    key = _mixed(key, FIRST, SECOND)
    best = tl.full((), float("-inf"), dtype=tl.float32)
    token = tl.full((), 0, dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < vocab
        score = tl.load(scores + b.to(tl.int64) * stride + v, mask=inside, other=float("-inf"))
        bits = _shifted(_mixed(key + (v + 1).to(tl.int64) * GOLDEN, FIRST, SECOND), 11)
        u = bits.to(tl.float32) * 1.1102230246251565e-16  # 2**-53
        u = tl.minimum(tl.maximum(u, 5.551115123125783e-17), 0.999999940395355224609375)  # 2**-54, 1 - 2**-24
        race = tl.where(inside, score - _log_of_exponential(u, ACCURATE), float("-inf"))
        most, at = tl.max(race, axis=0, return_indices=True)
        better = most > best  # the first among equals stays
        token = tl.where(better, (start + at).to(tl.int64), token)
        best = tl.where(better, most, best)
    tl.store(tokens + b, token)


@triton.jit
def _ordered(x):
    """int32 that are ordered as the float32 x are."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def least_kept(
    scores,  # (B, V) float32, rows `stride` apart
    top_k,  # (B,) int64, at least vocab: off; or None
    top_p,  # (B,) float32, 1: off; or None
    least,  # (B,) float32
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """The smallest score of each row that top-k and then top-p keep; -inf where neither cuts.

    By bisection over the bits of a score: how many are at least so large, or which probability those have.
    """
    b = tl.program_id(0)
    row = scores + b.to(tl.int64) * stride
    top = tl.full((), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.load(row + v, mask=v < vocab, other=float("-inf")), axis=0))
    highest = _ordered(top)
    lowest = tl.full((), -2139095041, dtype=tl.int32)  # of -inf
    kept = lowest
    if top_k is not None:
        k = tl.load(top_k + b)
        if k < vocab:
            low, high = lowest.to(tl.int64), highest.to(tl.int64)  # the answer is the largest with at least k
            while low < high:
                middle = (low + high + 1) >> 1
                count = tl.full((), 0, dtype=tl.int64)
                for start in range(0, vocab, BLOCK):
                    v = start + tl.arange(0, BLOCK)
                    x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
                    count += tl.sum(((_ordered(x).to(tl.int64) >= middle) & (v < vocab)).to(tl.int64), axis=0)
                low = tl.where(count >= k, middle, low)
                high = tl.where(count >= k, high, middle - 1)
            kept = low.to(tl.int32)
    if top_p is not None:
        p = tl.load(top_p + b)
        if p < 1.0:
            whole = tl.full((), 0.0, dtype=tl.float32)
            for start in range(0, vocab, BLOCK):
                v = start + tl.arange(0, BLOCK)
                x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
                there = (_ordered(x) >= kept) & (x > float("-inf"))
                whole += tl.sum(tl.where(there, tl.exp(x - top), 0.0), axis=0)
            # The largest with a probability of at least p at or above it.
            low, high = kept.to(tl.int64), highest.to(tl.int64)
            while low < high:
                middle = (low + high + 1) >> 1
                mass = tl.full((), 0.0, dtype=tl.float32)
                for start in range(0, vocab, BLOCK):
                    v = start + tl.arange(0, BLOCK)
                    x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
                    mass += tl.sum(tl.where(_ordered(x).to(tl.int64) >= middle, tl.exp(x - top), 0.0), axis=0)
                enough = mass >= p * whole
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            kept = low.to(tl.int32)
    bits = tl.where(kept < 0, kept ^ 0x7FFFFFFF, kept)
    tl.store(least + b, bits.to(tl.float32, bitcast=True))
