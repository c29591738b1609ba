"""Triton's decode attention: interpreted on the CPU, and run where a GPU is."""

from dataclasses import replace

import pytest
import torch

from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec, LayerAttention
from hasten.ops.picker import explain
from triton_cases import check_attention, needs_gpu, run_interpreted


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_attention.py")


def request(*, head_dim=64, device="cuda", dtype=torch.bfloat16):
    spec = AttentionSpec(heads=8, kv_heads=2, head_dim=head_dim, scale=0.125)
    return AttentionRequest(spec=spec, device=torch.device(device), dtype=dtype, queries=1, mask=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it needs a CUDA GPU; the layer is on cpu"),
        ({"dtype": torch.float32}, "not float32"),
        ({"head_dim": 320}, "the head size is 320; it goes up to 256"),
    ],
)
def test_refuses_in_words(changes, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = explain(KERNELS, request(**changes))
    assert choice.kernel != "triton"
    assert reason in dict(choice.others)["triton"]


def test_is_taken_on_cuda(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert explain(KERNELS, request()).kernel == "triton"
    several = dict(explain(KERNELS, replace(request(), queries=None)).others)
    assert several["triton"] == "it is for decoding, one query a sequence"


def test_a_pattern_on_cuda_decodes_without_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec = AttentionSpec(heads=8, kv_heads=2, head_dim=64, scale=0.125)
    asked = AttentionRequest(
        spec=spec, device=torch.device("cuda"), dtype=torch.bfloat16, block_mask=True, block_size=64, capability=(9, 0)
    )
    bound = LayerAttention.bind(asked)
    assert bound.tokens.name == "flex"
    assert {bound.dropout.name, bound.masked.name, bound.decode.name} == {"sdpa"}  # a mask of each head
    dense = LayerAttention.bind(replace(asked, block_mask=False, block_size=None))
    assert (dense.tokens.name, dense.masked.name, dense.decode.name) == ("sdpa", "sdpa", "triton")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (48, 1)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_on_a_gpu(heads, head_dim):
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
    for keys in (1, 130, 3000):
        for window, softcap in ((None, None), (100, None), (None, 30.0)):
            for dtype in (torch.bfloat16, torch.float16):
                check_attention(**sizes, keys=keys, window=window, softcap=softcap, dtype=dtype, device="cuda")
