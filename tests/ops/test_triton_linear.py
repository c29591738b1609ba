"""Triton's int8 and int4 products: interpreted on the CPU, compiled for Hopper without one, and run where a GPU is."""

import sys

import pytest
import torch

from hasten.ops import triton_support
from hasten.ops.linear import BFLOAT16, KERNELS, LinearRequest, int4_format
from hasten.ops.picker import explain
from linear_cases import make_weight
from triton_cases import FUSED_CASES, check_fused, check_linear, needs_gpu, run_interpreted


@pytest.mark.slow(minutes=3)
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_linear.py")


def request(**changes):
    values = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "format": int4_format(32), "in_features": 64}
    return LinearRequest(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "it needs a CUDA GPU; the layer is on cpu"),
        ({"dtype": torch.float32}, "not float32"),
        ({"format": int4_format(48)}, "its groups are 32, 64, 128, 256, not 48"),
        ({"format": BFLOAT16}, "PyTorch's own product"),
    ],
)
def test_refuses_in_words(changes, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused = dict(explain(KERNELS, request(**changes)).others)
    assert reason in refused["triton"]


def test_is_taken_on_cuda(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice = explain(KERNELS, request())
    assert choice.kernel == "triton"
    assert "it needs a CPU" in dict(choice.others)["native"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    assert "an old GPU has 7.5" in triton_support.refusal(torch.device("cuda"))
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in triton_support.refusal(torch.device("cuda"))


def test_nothing_of_triton_is_imported_before_it_is_asked_for():
    import subprocess

    code = (
        "import sys, torch, hasten\nfrom hasten.ops.linear import INT8, PackedLinear\nimport hasten.ops.attention\n"
        "layer = PackedLinear(64, 8, INT8, kernel='pytorch')\nassert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize(
    "format",
    [
        ("int8", 0, True),
        *((e, group, zero) for e in ("int4", "int8") for group in (32, 64, 128) for zero in (True, False)),
    ],
)
def test_on_a_gpu(rows, format):
    for size in ((70, 201), (4096, 4096), (11_008, 1000)):
        weight = make_weight(*size, format=format[0], group_size=format[1], symmetric=format[2])
        for dtype in (torch.bfloat16, torch.float16):
            check_linear(weight, rows=rows, dtype=dtype, with_bias=True, device="cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 70, 300])
@pytest.mark.parametrize(
    "format", [("int8", 0, True), ("int8", 32, False), ("int4", 32, True), ("int4", 128, False), ("bfloat16", 0, True)]
)
def test_norm_activation_and_residual_on_a_gpu(rows, format):
    for size in ((128, 328), (4096, 4096), (1408, 5632)):
        for case in FUSED_CASES:
            check_fused(format, n=size[0], k=size[1], rows=rows, device="cuda", **case)


@pytest.mark.gpu
@needs_gpu
def test_products_in_a_graph_give_the_same_bits():
    from hasten.ops.linear import NormArguments, PackedLinear, fused_linear

    weight = make_weight(4096, 4096, group_size=32).map(lambda tensor: tensor.cuda())
    operands = PackedLinear.from_weight(weight, kernel="triton").operands
    norm = NormArguments(torch.rand(4096, device="cuda").bfloat16(), None, 1e-5)
    for rows in (1, 16, 64):
        x = torch.randn(rows, 4096, device="cuda")

        def step(x=x):
            y = fused_linear(x, operands, norm=norm, residual=x, out_dtype=torch.bfloat16)
            return fused_linear(y, operands, norm=norm, activation="silu", gated=True, out_dtype=torch.bfloat16)

        first = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = step()
        for _ in range(5):  # whichever program of a tile comes last, the parts are added in the same order
            graph.replay()
            assert torch.equal(again, first)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("rows", "format", "inner"),
    [
        (1, ("bfloat16", 0, True), 5632),
        (1, ("int4", 32, True), 8448),
        *(
            (rows, own, 5632)
            for rows in (1, 4)
            for own in (("int8", 0, True), ("int4", 32, False), ("int4", 128, True))
        ),
    ],
)
def test_products_that_start_early_wait_for_what_they_read(rows, format, inner, monkeypatch):
    """Each product of a captured chain reads what the one before it wrote."""
    from hasten.ops.linear import NormArguments, PackedLinear, fused_linear

    k = 2048

    def made(n, k):
        weight = make_weight(n, k, format=format[0], group_size=format[1], symmetric=format[2])
        if format[0] == "bfloat16":
            return weight.cuda()
        return PackedLinear.from_weight(weight.map(lambda tensor: tensor.cuda()), kernel="triton").operands

    first, second = made(2 * inner, k), made(k, inner)
    norm = NormArguments(torch.rand(k, device="cuda").div(k).bfloat16(), None, 1e-5)
    x = torch.randn(rows, k, device="cuda")

    def chain():
        y, how = x, {"out_dtype": torch.bfloat16}
        for _ in range(16):
            inside = fused_linear(y, first, norm=norm, activation="silu", gated=True, **how)
            y = fused_linear(inside, second, residual=y, **how)
        return y

    early = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    monkeypatch.setattr(triton_support, "starts_early", lambda device: False)
    late = chain()
    assert late.isfinite().all()
    assert torch.equal(early, late)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, late)
