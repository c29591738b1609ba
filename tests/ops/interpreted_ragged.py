"""Triton's attention over a cache in its interpreter; run by test_triton_ragged.py in a process of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.attention import AttentionSpec, paged, ragged
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.attention.view import AttentionMetadata, KVView
from ragged_cases import check_ragged

COUNTS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=4)
HEADS = st.sampled_from([(4, 4), (4, 2), (6, 1), (7, 1)])


@settings(max_examples=25, derandomize=True)
@given(
    counts=COUNTS,
    heads=HEADS,
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    window=st.one_of(st.none(), st.integers(1, 60)),
    softcap=st.sampled_from([None, 5.0]),
    size=st.sampled_from([16, 5, None]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_prompts_and_decodes_err_at_most_twice_plain_pytorch(**case):
    check_ragged(**case, device="cpu")


@settings(max_examples=25, derandomize=True)
@given(
    before=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    heads=HEADS,
    head_dim=st.sampled_from([64, 96, 128]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    size=st.sampled_from([16, None]),
    counted=st.booleans(),
)
def test_decoding_with_keys_split_among_programs(before, heads, head_dim, window, size, counted):
    check_ragged(
        counts=[(n, 1) for n in before],
        heads=heads,
        head_dim=head_dim,
        window=window,
        softcap=None,
        size=size,
        dtype=torch.float16,
        device="cpu",
        counted=counted,
        splits=4,
    )


@pytest.mark.parametrize("rows", [RowFormat(8), RowFormat(8, rotated=True)])
def test_int8_caches(rows):
    for counts in ([(70, 1), (0, 1)], [(3, 20), (90, 1)]):
        check_ragged(
            counts=counts,
            heads=(4, 2),
            head_dim=64,
            window=None,
            softcap=None,
            size=16,
            dtype=torch.float16,
            device="cpu",
            rows=rows,
        )


@pytest.mark.parametrize("padded", [0, 3])
def test_padding_is_finite_and_changes_nothing(padded):
    """Sequences of no tokens, and rows of q that belong to none."""
    k, v = torch.randn(2, 33, 2, 16, generator=torch.Generator().manual_seed(0)).half().unbind()
    q = torch.randn(2 + padded, 4, 16, generator=torch.Generator().manual_seed(1)).half()
    starts = torch.tensor([0, 1, 2] + [2] * padded)
    table = torch.tensor([[0, 0], [1, 0]] + [[0, 0]] * padded)
    lengths = torch.tensor([9, 12] + [0] * padded)
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25)
    metadata = AttentionMetadata(starts[:-1], starts, lengths, None, table, 16, PLAIN, max_query=1, longest=32)
    found = ragged.over_view(q, KVView(k, v, metadata), spec=spec)
    alone = metadata._replace(query_start_loc=starts[:3], seq_lens=lengths[:2], block_table=table[:2])
    assert torch.equal(found[:2], ragged.over_view(q[:2], KVView(k, v, alone), spec=spec))
    assert (found[2:] == 0).all()
    mixed = ragged.over_view(q, KVView(k, v, metadata._replace(max_query=4)), spec=spec)
    torch.testing.assert_close(mixed[:2], found[:2], atol=2e-3, rtol=0)
    assert (mixed[2:] == 0).all()


def test_sequences_that_begin_again_in_their_block():
    """A bounded cache: position p stands in row p modulo the block's size, and a window hides what was overwritten."""
    window, size, length = 10, 20, 47
    k, v = torch.randn(2, length, 2, 16, generator=torch.Generator().manual_seed(0)).half().unbind()
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1)).half()
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25, window=window)
    whole = AttentionMetadata(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([length]), torch.tensor([0]))
    around = whole._replace(first_slots=None, block_table=torch.tensor([[0]]), block_size=size)
    held = torch.zeros(2, size + 1, 2, 16).half()
    for p in range(length):
        held[0, p % size], held[1, p % size] = k[p], v[p]
    expected = ragged.over_view(q, KVView(k, v, whole), spec=spec)
    found = ragged.over_view(q, KVView(*held.unbind(), around), spec=spec)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_int4_rows_are_refused():
    rows = torch.zeros(5, 2, 36, dtype=torch.uint8)
    view = KVView(rows, rows, AttentionMetadata(*[torch.zeros(1)] * 4))
    with pytest.raises(ConfigError, match="in 16 or 8 bits"):
        paged.triton(torch.zeros(1, 4, 64), view, spec=AttentionSpec(heads=4, kv_heads=2, head_dim=64, scale=1.0))


def test_the_operator_is_registered_as_pytorch_wants_it():
    q, k = torch.randn(2, 4, 16).half(), torch.randn(31, 2, 16).half()
    ends = torch.tensor([0, 1, 2]), torch.tensor([5, 15]), torch.tensor([0, 15])
    counters = torch.zeros(64, dtype=torch.int32)
    torch.library.opcheck(ragged.operator.dispatched, (q, k, k.clone(), *ends, None, 0, counters, 1, 15, 0.25, 0, 0.0))
