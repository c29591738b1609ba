"""The Triton loss in Triton's interpreter; run by test_loss.py in a process of its own."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hasten.ops.loss import linear_cross_entropy
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
    with pytest.raises(Exception, match="soft-capping"):
        linear_cross_entropy(x, weight, targets, softcap=3.0, kernel="chunked-triton")
