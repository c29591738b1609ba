"""The Triton loss in Triton's interpreter; run by test_loss.py in a process of its own."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.loss import linear_cross_entropy
from hasten.ops.loss.chunked import chunked_triton
from hasten.ops.loss.kernels import Head
from loss_cases import check_triton_loss


@settings(derandomize=True, max_examples=40, phases=[Phase.generate])
@given(
    rows=st.integers(1, 20),
    vocab=st.sampled_from([1, 5, 50, 4096, 5000]),
    padding=st.integers(0, 9),
    chunk_rows=st.integers(1, 24),
    with_bias=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_sizes(rows, vocab, padding, chunk_rows, with_bias, masked, dtype):
    sizes = {"rows": rows, "vocab": vocab, "padding": padding, "masked": masked}
    check_triton_loss("cpu", dtype, with_bias=with_bias, chunk_rows=chunk_rows, **sizes)


def test_it_is_taken_and_can_do_without_gradients():
    x, weight = torch.randn(6, 8), torch.randn(20, 8)
    targets = torch.randint(17, (6,))
    found = linear_cross_entropy(x, weight, targets, vocab_size=17, kernel="chunked-triton")
    same = linear_cross_entropy(x, weight, targets, vocab_size=17, kernel="reference")
    torch.testing.assert_close(found, same)
    strided = torch.stack([targets, targets.flip(0)], dim=1)[:, 0]
    assert linear_cross_entropy(x, weight, strided, vocab_size=17, kernel="chunked-triton") == found
    with pytest.raises(ConfigError, match="soft-capping"):
        linear_cross_entropy(x, weight, targets, softcap=3.0, kernel="chunked-triton")


@pytest.mark.parametrize("target", [-1, 17, 19, 20, 1000])
def test_targets_that_are_no_tokens_make_the_loss_infinite(target):
    """Where they are not looked at before, as on CUDA; nothing outside the row is read."""
    x, weight = torch.randn(6, 8), torch.randn(20, 8)
    targets = torch.tensor([1, 2, target, 4, -100, 6])
    assert chunked_triton(x, targets, Head(weight, 17)) == torch.inf
