"""FlashAttention in Triton: what the picker says of it, its tests in the interpreter, and those that need a GPU."""

import pytest
import torch

from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec
from hasten.ops.picker import explain, pick
from triton_cases import needs_gpu, run_interpreted


@pytest.mark.slow(minutes=1)
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_flash.py")


def request(*, spec=(), **changes):
    spec = AttentionSpec(**{"heads": 8, "kv_heads": 2, "head_dim": 64, "scale": 0.125} | dict(spec))
    known = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "capability": (9, 0)}
    return AttentionRequest(spec=spec, **known | {"queries": 100, "keys": 100} | changes)


LONG = {"queries": 4096, "keys": 4096}


LAYER = {"queries": None, "keys": None}


@pytest.mark.parametrize(
    "changes",
    [
        LONG | {"gradient": False},
        LONG | {"spec": {"head_dim": 256}, "gradient": False},
        LONG | {"spec": {"window": 512}, "gradient": True},
        LONG | {"spec": {"softcap": 30.0, "head_dim": 256}, "gradient": True},
        {"queries": 2048, "keys": 4096},
        LONG | {"documents": True},
        LONG | {"key_lengths": True},
        {"queries": 512, "keys": 512, "spec": {"softcap": 30.0}},
        LAYER | {"spec": {"window": 512}},
        LAYER | {"spec": {"softcap": 50.0}},
    ],
)
def test_is_taken_where_it_is_the_fastest(changes, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert pick(KERNELS, request(**changes)).name == "flash-triton"


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        (LONG, "cudnn"),
        (LONG | {"gradient": True}, "cudnn"),
        (LONG | {"spec": {"head_dim": 256}, "gradient": True}, "cudnn"),
        (LONG | {"spec": {"causal": False}, "gradient": True}, "cudnn"),
        (LONG | {"capability": (8, 0), "gradient": True}, "flash"),
        (LONG | {"mask": True}, "memory-efficient"),
        (LAYER, "sdpa"),
        ({}, "flash"),
        ({"spec": {"window": 30}}, "memory-efficient"),
    ],
)
def test_what_comes_before_it(changes, kernel, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert pick(KERNELS, request(**changes)).name == kernel


def test_what_needs_the_same_bits_every_time_does_not_take_cudnn(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.use_deterministic_algorithms(True)
    try:
        choice = explain(KERNELS, request(**LONG, gradient=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert choice.kernel == "flash-triton"
    assert "use_deterministic_algorithms" in dict(choice.others)["cudnn"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "it needs a CUDA GPU; the layer is on cpu"),
        ({"dtype": torch.float32}, "it takes bfloat16 and float16, not float32"),
        ({"spec": {"head_dim": 320}}, "the head size is 320; it goes up to 256"),
        ({"spec": {"scale": -1.0}}, "it wants a scale above zero; this one is -1.0"),
        ({"mask": True}, "it takes no explicit mask"),
        ({"key_padding": True}, "it takes no key-padding mask; give lengths"),
        ({"bias": True}, "it takes no bias"),
        ({"alibi": True}, "it takes no ALiBi"),
        ({"block_mask": True}, "it takes no block mask"),
        ({"dropout": True}, "it takes no dropout"),
        ({"capability": (7, 5)}, "it needs compute capability 8.0 or later, cuda has 7.5"),
        ({}, "from 2,048 queries on it is faster than PyTorch's; on few its launch costs the host more"),
        (
            {"queries": None, "keys": None},
            "from 2,048 queries on it is faster than PyTorch's; on few its launch costs the host more",
        ),
        ({"capability": (8, 0)}, "it was measured on Hopper GPUs only: elsewhere by name"),
        (
            {"queries": 100, "keys": 100, "spec": {"softcap": 30.0}},
            "on fewer than 128 queries its launch costs the host more than explicit scores",
        ),
        (LONG | {"spec": {"head_dim": 256}}, "its backward pass is slower than PyTorch's with heads above 128"),
    ],
)
def test_says_why_it_is_not_taken(changes, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert dict(explain(KERNELS, request(**changes)).others)["flash-triton"] == reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"key_lengths": True},
        {"documents": True},
        {"gradient": True},
        {"spec": {"softcap": 30.0, "window": 5}},
        {"queries": 7},
    ],
)
def test_serves_what_is_asked_by_name(changes, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert pick(KERNELS, request(**changes), forced="flash-triton").name == "flash-triton"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(heads, head_dim, dtype):
    from flash_cases import check_flash, tensors

    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "dtype": dtype, "device": "cuda"}
    for queries, keys in ((1, 1), (130, 130), (77, 1000), (1000, 700), (1000, 1000)):
        for options in ({}, {"causal": False}, {"window": 100}, {"softcap": 30.0}):
            check_flash(*tensors(queries=queries, keys=keys, **sizes), **options)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_tiles_on_a_gpu(head_dim, dtype):
    """On a Hopper GPU by kernels of its own, which must have been taken there."""
    from flash_cases import check_flash, tensors
    from hasten.ops.attention import flash_hopper
    from hasten.ops.attention.flash_launch import Problem

    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype, "device": "cuda"}
    for queries, keys, options in ((512, 512, {}), (256, 640, {}), (384, 256, {"causal": False})):
        inputs = tensors(queries=queries, keys=keys, **sizes)
        check_flash(*inputs, **options)
        if torch.cuda.get_device_capability() == (9, 0):
            assert flash_hopper.serves(*inputs[:3], Problem(None, None, None, 0.1, **options))


@pytest.mark.gpu
@needs_gpu
def test_packed_documents_on_a_gpu():
    from hasten.ops.attention import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3000, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    starts = torch.tensor([0, 1, 1, 700, 1500, 3000], device="cuda")
    exact = attention(q.double(), k.double(), v.double(), cu_seqlens=starts, kernel="reference")
    plain = attention(q, k, v, cu_seqlens=starts, kernel="sdpa")
    found = attention(q, k, v, cu_seqlens=starts, kernel="flash-triton")
    assert (found - exact).square().mean() <= 4 * (plain - exact).square().mean()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [2000, 2048])
def test_the_same_bits_every_time_on_a_gpu(count):
    from flash_cases import all_of, tensors
    from hasten.ops.attention.flash_triton import flash_attention

    sizes = {"queries": count, "keys": count, "heads": 8, "kv_heads": 2, "head_dim": 128}
    inputs = tensors(**sizes, dtype=torch.bfloat16, device="cuda")
    first = all_of(flash_attention, *inputs)
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, all_of(flash_attention, *inputs), strict=True))
    compiled = torch.compile(flash_attention, fullgraph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, all_of(compiled, *inputs), strict=True))
