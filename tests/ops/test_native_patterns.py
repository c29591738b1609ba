"""Native attention over a cache where a sparse pattern hides blocks: what the layout says, and the same bits alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.attention.block_mask import BlockMask, seen_blocks
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.attention.pattern_text import parse_pattern
from hasten.ops.native import library
from instruction_sets import ISAS

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")

PATTERNS = [
    "bigbird:block=64,random-blocks=1",
    "bigbird:block=16,random-blocks=2,per-head=true",
    "fixed:block=48,local-blocks=3,global-patterns=2",
    "strided:block=128,radius=0,stride=3",
    "local:block=64,radius=2",
    "sliding-window:block=20,window=2",
    "atrous:block=1,stride=3",
    "atrous:block=64,stride=2",
]


def run(isa, q, kept, rows, length, seen):
    """q (T, H, D), the last ones of `length` positions, whose keys stand in a ring of `kept`'s rows."""
    k, v = kept
    start, table = torch.tensor([0, len(q)]), torch.zeros(1, 1, dtype=torch.int64)
    where = (start, torch.tensor([length]), None, table, len(k) - 1, rows.rotated)
    return library(isa).ops.attention(q, k, v, *where, q.shape[-1] ** -0.5, 0, 0.0, seen)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8)
@given(
    st.integers(0, 1000),
    st.sampled_from(PATTERNS),
    st.sampled_from([1, 3, 64, 130]),
    st.sampled_from([0, 200, 1111]),
    st.sampled_from([(4, 2), (8, 1)]),
    st.sampled_from([PLAIN, RowFormat(8), RowFormat(4, rotated=True)]),
)
def test_only_what_the_pattern_shows_is_attended(isa, seed, text, tokens, before, heads, rows):
    pattern, length, size = parse_pattern(text), tokens + before, 32
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads[0], size, generator=generator).bfloat16()
    k, v = torch.randn(2, length, heads[1], size, generator=generator).bfloat16()
    ring = length if pattern.reach is None else min(length, pattern.reach + tokens)
    kept = []
    for values in (rows.write(k), rows.write(v)):
        room = torch.zeros(ring + 1, *values.shape[1:], dtype=values.dtype)
        room[torch.arange(length - ring, length) % ring] = values[length - ring :]
        kept.append(room)
    table = seen_blocks(pattern, -(-length // pattern.block), heads=heads[0], layer=1)
    seen = library(isa).ops.plan_pattern(table, pattern.block, pattern.reach or 0)
    found = run(isa, q, kept, rows, length, seen)
    mask = BlockMask.of(pattern, length, queries=tokens, heads=heads[0], layer=1).dense(tokens, length, q.device)
    k, v = (rows.read(rows.write(t), size, torch.float64).repeat_interleave(heads[0] // heads[1], 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * size**-0.5
    exact = torch.einsum("hts,shd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)  # a wrong key is off by far more
    for t in {0, tokens // 2, tokens - 1}:
        alone = run(isa, q[t : t + 1], kept, rows, before + t + 1, seen)
        assert torch.equal(alone[0], found[t]), t


def test_a_table_that_is_none_is_refused():
    for table in (torch.ones(2, 3, dtype=torch.bool), torch.ones(1, 2, 3)):
        with pytest.raises(RuntimeError, match="the table of a pattern is bool"):
            library().ops.plan_pattern(table, 64, 0)
