"""Triton's int8 and int4 products: interpreted on the CPU, compiled for Hopper without one, and run where a GPU is."""

import sys

import pytest
import torch

from hasten.ops import triton_support
from hasten.ops.linear import BFLOAT16, KERNELS, LinearRequest, int4_format
from hasten.ops.picker import explain
from linear_cases import make_weight
from triton_cases import check_linear, needs_gpu, run_interpreted


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_linear.py")


def request(**changes):
    values = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "format": int4_format(32), "in_features": 64}
    return LinearRequest(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "it runs on CUDA, the layer is on cpu"),
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
    assert "it runs on a CPU" in dict(choice.others)["native"]
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
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 100])
@pytest.mark.parametrize(
    "format",
    [
        ("int8", 0, True),
        *((e, group, zero) for e in ("int4", "int8") for group in (32, 64, 128) for zero in (True, False)),
    ],
)
def test_on_a_gpu(rows, format):
    for size in ((70, 200), (4096, 4096), (11_008, 1000)):
        weight = make_weight(*size, format=format[0], group_size=format[1], symmetric=format[2])
        for dtype in (torch.bfloat16, torch.float16):
            check_linear(weight, rows=rows, dtype=dtype, with_bias=True, device="cuda")
