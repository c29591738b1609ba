"""Attention over blocks: the native kernel against the gathered reference, chunks and decodes in one call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.attention import AttentionSpec, paged
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.attention.reference import reference
from hasten.ops.attention.sdpa import sdpa
from hasten.ops.attention.view import AttentionMetadata, KVView
from hasten.ops.native import library
from layer_attention import layer_of

native = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")


def a_step(counts, *, kv_heads, head_dim, size, rows, seed, by_head=True):
    """A view of sequences with (earlier, new) tokens, blocks in a random order, NaN where no token is."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [before + new for before, new in counts]
    needed = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(needed), generator=generator).tolist()
    table = torch.zeros(len(counts), max(needed), dtype=torch.int64)
    slots = sum(needed) * size + 1
    shape = (2, kv_heads, slots, head_dim) if by_head else (2, slots, kv_heads, head_dim)
    k, v = (
        torch.randn(shape, generator=generator).bfloat16().transpose(1, 2)
        if by_head
        else torch.randn(shape, generator=generator).bfloat16()
    ).unbind()
    held = torch.zeros(slots, dtype=torch.bool)
    for own, n, blocks in zip(table, lengths, needed, strict=True):
        own[:blocks] = torch.tensor([order.pop() for _ in range(blocks)])
        places = torch.arange(n)
        held[own[places // size] * size + places % size] = True
    k[~held], v[~held] = float("nan"), float("nan")
    k, v = rows.write(k), rows.write(v)
    starts = torch.tensor([0, *(new for _, new in counts)]).cumsum(0)
    metadata = AttentionMetadata(starts[:-1], starts, torch.tensor(lengths), None, table, size, rows)
    return KVView(k, v, metadata), generator


def gathered(q, view, spec, dense):
    _, starts, lengths, _, table, size, *_ = view.metadata
    side_by_side = paged.groups_of(starts.numpy(), lengths.numpy(), table.numpy(), size)
    return paged.gathered(q, view, spec=spec, groups=lambda: side_by_side, dense=layer_of(dense, spec))


def mean_square(x):
    return x.double().square().mean()


ROWS = (PLAIN, RowFormat(8), RowFormat(8, rotated=True), RowFormat(4), RowFormat(4, rotated=True))
COUNTS = st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=6)


@native
@settings(max_examples=60)
@given(
    counts=COUNTS,
    heads=st.sampled_from([(4, 4), (8, 2), (6, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 128, 512]),
    window=st.sampled_from([None, 1, 5, 64]),
    softcap=st.sampled_from([None, 5.0]),
    size=st.sampled_from([1, 4, 16]),
    rows=st.sampled_from(ROWS),
    seed=st.integers(0, 99),
)
def test_native_errs_at_most_twice_what_gathered_errs(counts, heads, head_dim, window, softcap, size, rows, seed):
    view, generator = a_step(counts, kv_heads=heads[1], head_dim=head_dim, size=size, rows=rows, seed=seed)
    spec = AttentionSpec(
        heads=heads[0], kv_heads=heads[1], head_dim=head_dim, scale=head_dim**-0.5, window=window, softcap=softcap
    )
    q = torch.randn(int(view.metadata.query_start_loc[-1]), heads[0], head_dim, generator=generator).bfloat16()

    def side(kept, dtype):
        """What lies behind a sequence's end takes part in the reference, with weight 0: there it may not be NaN."""
        return torch.nan_to_num(rows.read(kept, head_dim, dtype))

    plainly = view.metadata._replace(rows=PLAIN)
    wide, narrow = (
        KVView(side(view.k, dtype), side(view.v, dtype), plainly) for dtype in (torch.float64, torch.bfloat16)
    )
    exact = gathered(q.double(), wide, spec, reference)
    plain = gathered(q, narrow, spec, sdpa if softcap is None else reference)
    found = paged.native(q, view, spec=spec)
    assert (found.dtype, found.shape) == (q.dtype, q.shape)
    # One unit of the last place: with a handful of outputs the reference may err by chance not at all.
    unit = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert mean_square(found - exact) <= 4 * mean_square(plain - exact) + unit**2 * max(0, 1 - found.numel() / 2000)


@native
@settings(max_examples=40)
@given(counts=COUNTS, rows=st.sampled_from(ROWS), seed=st.integers(0, 99), by_head=st.booleans())
def test_a_token_has_the_same_bits_in_any_company_and_chunk(counts, rows, seed, by_head):
    view, generator = a_step(counts, kv_heads=2, head_dim=64, size=4, rows=rows, seed=seed, by_head=by_head)
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=64, scale=0.125)
    q = torch.randn(int(view.metadata.query_start_loc[-1]), 4, 64, generator=generator).bfloat16()
    together = paged.native(q, view, spec=spec)
    for b, (before, new) in enumerate(counts):
        for place in {0, new - 1}:
            row = int(view.metadata.query_start_loc[b]) + place
            step = view.metadata._replace(
                slot_mapping=view.metadata.slot_mapping[:1],
                query_start_loc=torch.tensor([0, 1]),
                seq_lens=torch.tensor([before + place + 1]),
                block_table=view.metadata.block_table[b : b + 1],
            )
            one = view._replace(metadata=step)
            assert torch.equal(paged.native(q[row : row + 1], one, spec=spec)[0], together[row])
