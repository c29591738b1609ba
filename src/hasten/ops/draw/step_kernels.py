"""Triton kernels around a decode step: the places of its tokens before it, the batch moved on by one token after it.

Importing this file imports Triton.
"""

import triton
import triton.language as tl


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
    room = columns * block_size  # what lies behind is written nowhere, and never read
    position = tl.maximum(tl.minimum(tl.minimum(start + w, length - 1), room - 1), 0)
    block = tl.load(table + s * columns + position // block_size)
    there = (w < count) & (length > 0) & (start + w < room)
    tl.store(positions + s * W + w, position)
    tl.store(slots + s * W + w, tl.where(there, block * block_size + position % block_size, -1))
    tl.store(seq_lens + s, tl.where(length > 0, tl.minimum(start + W, room), 0))


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
