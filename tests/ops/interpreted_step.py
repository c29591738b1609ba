"""A decode step's attention in one launch, interpreted; run by test_triton_ragged.py in a process of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_cases import check_step


@settings(max_examples=30, derandomize=True)
@given(
    before=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (7, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 128, 256]),
    half=st.sampled_from([0, 4, 8]),
    normed=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 60)),
    softcap=st.sampled_from([None, 5.0]),
    size=st.sampled_from([16, 5, None]),
    splits=st.sampled_from([1, 3, None]),
    counted=st.booleans(),
    padded=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_one_launch_is_the_two_it_replaces(**case):
    check_step(**case, device="cpu")


def test_the_operator_is_registered_as_pytorch_wants_it():
    from hasten.ops.attention.step import decode_step

    qkv, k = torch.randn(2, 8 * 16).half(), torch.randn(31, 2, 16).half()
    where = torch.tensor([4, 29]), k, k.clone(), torch.tensor([5, 15]), torch.tensor([0, 15]), None, 0
    counters = torch.zeros(64, dtype=torch.int32)
    with pytest.MonkeyPatch.context():
        torch.library.opcheck(
            decode_step.dispatched, (qkv, None, None, None, None, *where, counters, 15, 4, 0.0, 0.0, 0.25, 0, 0.0)
        )
