"""What our options hide is what xformers' attention biases of the same meaning hide: their `materialize()` says it.

xformers computes on CUDA only (docs/results/gpu-status.md); its biases are plain PyTorch and need no GPU.
"""

import warnings

import pytest
import torch

from hasten.ops.attention import attention
from hasten.ops.picker import explained

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it has no operators here
    biases = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="pip install --no-deps xformers")
    fmha = pytest.importorskip("xformers.ops.fmha")

STARTS, LONGER = torch.tensor([0, 5, 6, 20]), torch.tensor([0, 9, 10, 26])
LENGTHS = [9, 3, 6]
PACKED = biases.BlockDiagonalMask.from_seqlens([5, 1, 14])
UNEQUAL = biases.BlockDiagonalMask.from_seqlens([5, 1, 14], [9, 1, 16])
PADDED = biases.BlockDiagonalPaddedKeysMask.from_seqlens([4] * 3, 9, LENGTHS)


@pytest.mark.parametrize(
    ("bias", "sizes", "options"),
    [
        (biases.LowerTriangularMask(), (1, 20, 20), {}),
        (biases.LowerTriangularFromBottomRightMask(), (1, 13, 20), {}),
        (biases.LowerTriangularFromBottomRightLocalAttentionMask(_window_size=6), (1, 13, 20), {"window": 6}),
        (biases.LocalAttentionFromBottomRightMask(window_left=4, window_right=0), (1, 20, 20), {"window": 5}),
        (PACKED, (1, 20, 20), {"cu_seqlens": STARTS, "causal": False}),
        (PACKED.make_causal(), (1, 20, 20), {"cu_seqlens": STARTS}),
        (PACKED.make_local_attention(3), (1, 20, 20), {"cu_seqlens": STARTS, "window": 3}),
        (UNEQUAL.make_causal_from_bottomright(), (1, 20, 26), {"cu_seqlens": STARTS, "cu_seqlens_k": LONGER}),
        (PADDED, (3, 4, 9), {"key_padding_mask": torch.tensor(LENGTHS), "causal": False}),
        (PADDED, (3, 4, 9), {"key_padding_mask": torch.arange(9) < torch.tensor(LENGTHS)[:, None], "causal": False}),
    ],
)
def test_a_bias_of_xformers_hides_what_ours_hides(bias, sizes, options):
    batch, queries, keys = sizes
    q, k, v = (torch.randn(batch, n, 2, 8) for n in (queries, keys, keys))
    whole = bias.materialize((batch * queries, batch * keys))
    flat = [x.reshape(1, -1, 2, 8) for x in (q, k, v)]
    expected = attention(*flat, bias=whole, causal=False, kernel="reference").view_as(q)
    torch.testing.assert_close(attention(q, k, v, **options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_its_operator_gives_what_ours_gives():
    q, k, v = torch.randn(3, 2, 200, 4, 64, device="cuda", dtype=torch.bfloat16)
    theirs = fmha.memory_efficient_attention(q, k, v, attn_bias=biases.LowerTriangularMask())
    torch.testing.assert_close(attention(q, k, v), theirs, rtol=0.02, atol=0.02)


def test_its_dispatcher_and_our_picker_refuse_operators_of_cuda():
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(NotImplementedError) as refused:
        fmha.memory_efficient_attention(q, q, q, attn_bias=biases.LowerTriangularMask())
    *_, reasons = str(refused.value).partition("is not supported because:")
    assert "device=cpu (supported: {'cuda'})" in reasons
    with explained() as choices:
        attention(q, q, q)
    against = dict(choices[0].others)
    assert "CUDA" in against["flash-triton"]
    assert "CPU" in against["memory-efficient"]
    assert "CPU" in against["cudnn"]
