"""Triton's decode attention in its interpreter; run by test_triton_decode.py in a process of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.attention import attention
from hasten.ops.attention.triton_decode import operator
from triton_cases import check_attention


@settings(max_examples=20, derandomize=True)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (24, 1)]),
    head_dim=st.sampled_from([8, 64, 80, 96, 128]),
    keys=st.integers(1, 300),
    window=st.one_of(st.none(), st.integers(1, 200)),
    softcap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_errs_at_most_twice_plain_pytorch(heads, head_dim, keys, window, softcap, dtype):
    check_attention(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        keys=keys,
        window=window,
        softcap=softcap,
        dtype=dtype,
        device="cpu",
    )


def test_the_largest_head_and_group():
    check_attention(
        heads=32, kv_heads=1, head_dim=256, keys=140, window=None, softcap=30.0, dtype=torch.float16, device="cpu"
    )


def test_a_mask_with_holes():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 4, 16).half(), torch.randn(2, 400, 2, 16).half(), torch.randn(2, 400, 2, 16).half()
    mask = torch.rand(2, 1, 400) < 0.1
    mask[:, :, 128:256] = False  # a whole part that nobody sees
    exact = attention(q.double(), k.double(), v.double(), mask=mask, kernel="reference")
    y = attention(q, k, v, mask=mask, kernel="triton")
    plain = attention(q, k, v, mask=mask, kernel="sdpa")
    assert (y - exact).square().mean() <= 4 * (plain - exact).square().mean()


def test_causal_without_a_mask():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 4, 16).half(), torch.randn(1, 50, 2, 16).half(), torch.randn(1, 50, 2, 16).half()
    expected = attention(q.float(), k.float(), v.float(), window=7, kernel="reference")
    torch.testing.assert_close(attention(q, k, v, window=7, kernel="triton").float(), expected, atol=4e-3, rtol=0)


def test_several_queries_are_refused():
    q = torch.randn(1, 5, 4, 16).half()
    with pytest.raises(ConfigError, match="one query a sequence"):
        attention(q, q, q, kernel="triton")


def test_a_query_that_sees_nothing_gets_zeros():
    q, k = torch.randn(1, 1, 4, 16).half(), torch.randn(1, 20, 2, 16).half()
    assert (attention(q, k, k, mask=torch.zeros(1, 20, dtype=torch.bool), kernel="triton") == 0).all()


def test_neighbours_change_nothing():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 16).half(), torch.randn(3, 200, 2, 16).half(), torch.randn(3, 200, 2, 16).half()
    alone = attention(q[1:2], k[1:2], v[1:2], kernel="triton")
    assert torch.equal(attention(q, k, v, kernel="triton")[1:2], alone)


def testoperator_is_registered_as_pytorch_wants_it():
    q, k = torch.randn(2, 4, 16).half(), torch.randn(2, 30, 2, 16).half()
    torch.library.opcheck(operator, (q, k, k.clone(), torch.ones(2, 30, dtype=torch.bool), 0.25, 0, 0.0))
