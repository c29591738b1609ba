"""What attention is given besides q, k and v, by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import exact
from hasten.ops.attention import KERNELS, AttentionSpec, attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.inputs import AttentionInputs, Intervals, document_intervals
from hasten.ops.attention.patterns import Atrous, Local
from instruction_sets import needs_native


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 20, heads, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", ["reference", "flash", "sdpa", "math", "chunked"])
def test_a_kernel_without_more_arguments_hides_and_drops_nothing(name):
    q, k, v = tensors()
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5)
    run = next(kernel.run for kernel in KERNELS if kernel.name == name)
    expected = exact(q, k, v).float()
    torch.testing.assert_close(run(q, k, v, spec, AttentionInputs()), expected, rtol=1e-5, atol=1e-5)


def test_padding_of_one_stretch_a_row_is_intervals():
    whole, left, right, none = [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]
    found = Intervals.of_padding(torch.tensor([whole, left, right, none]).bool())
    assert found is not None
    assert (found.high - found.low + 1).flatten().tolist() == [4, 2, 3, 0]
    assert found.low[:3].flatten().tolist() == [0, 2, 0]
    lengths = Intervals.of_padding(torch.tensor([4, 0]))
    assert [bound.tolist() for bound in lengths] == [[[0], [0]], [[3], [-1]]]


def test_padding_with_gaps_and_on_a_device_is_a_mask():
    assert Intervals.of_padding(torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()) is None
    assert Intervals.of_padding(torch.ones(2, 3, dtype=torch.bool, device="meta")) is None


@pytest.mark.parametrize("kernel", [pytest.param(None, marks=needs_native), "math", "reference"])
@pytest.mark.parametrize("lengths", [None, [20, 11]])
@pytest.mark.parametrize("pattern", [Atrous(stride=2, block=1), Local(radius=1, block=16)])
def test_a_window_narrows_a_pattern(pattern, lengths, kernel):
    q, k, v = tensors()
    mask = BlockMask.of(pattern, 20, window=5)
    places = torch.arange(20)
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < 5)
    if isinstance(pattern, Atrous):
        seen &= behind % 2 == 0
    padding = None if lengths is None else torch.tensor(lengths)
    there = None if padding is None else places < padding[:, None]
    expected = exact(q, k, v, mask=seen, key_padding_mask=there).float()
    found = attention(q, k, v, block_mask=mask, key_padding_mask=padding, kernel=kernel)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [None, "reference", "flash", "sdpa", "math", "chunked"])
def test_queries_of_packed_documents_that_are_not_causal_see_their_own_alone(kernel):
    q, k, v = tensors()
    ends, key_ends = torch.tensor([0, 7, 7, 30, 40]), torch.tensor([0, 9, 12, 31, 40])
    expected = exact(q, k, v, causal=False, cu_seqlens=ends, cu_seqlens_k=key_ends).float()
    found = attention(q, k, v, causal=False, cu_seqlens=ends, cu_seqlens_k=key_ends, kernel=kernel)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_token_sees_its_document_up_to_itself():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [5, 5, 7, 7, 7, 7]])
    found = document_intervals(documents)
    assert found.low.tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 2, 2, 2, 2]]
    assert found.high.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert found.low.dtype == found.high.dtype == torch.int32


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.none() | st.integers(1, 8))
def test_a_window_is_the_last_keys_of_a_document(lengths, window):
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    places = torch.arange(sum(lengths))
    behind = places[:, None] - places
    expected = (behind >= 0) & (documents[0][:, None] == documents[0])
    if window is not None:
        expected &= behind < window
    found = document_intervals(documents, window)
    assert torch.equal(found.dense(sum(lengths))[0], expected)
