"""Triton's kernels of experts: interpreted on the CPU, and run where a GPU is."""

from dataclasses import replace

import pytest
import torch

from expert_cases import FORMATS, PLAIN, ExpertCase
from hasten.model.experts import Experts, experts_of
from hasten.model.families import read_config
from hasten.model.grouped_experts import weights_of
from hasten.model.initialize import initialize
from hasten.ops.experts import KERNELS, ExpertsRequest
from hasten.ops.linear import BFLOAT16, INT8, LinearRequest, int4_format
from hasten.ops.linear.weights import MXFP4
from hasten.ops.picker import explain
from references import values_of
from triton_cases import needs_gpu, run_interpreted


@pytest.mark.slow(minutes=1)
def test_in_the_interpreter():
    run_interpreted("ops/interpreted_experts.py")


def request(*, format=BFLOAT16, down=None, inner_features=64, activation="silu", unusual=None, **changes):
    common = {"device": torch.device("cuda"), "dtype": torch.bfloat16} | changes
    first = LinearRequest(format=format, in_features=128, **common)
    second = LinearRequest(format=down or format, in_features=inner_features, **common)
    return ExpertsRequest(inner=first, down=second, activation=activation, unusual=unusual)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "it needs a CUDA GPU; the layer is on cpu"),
        ({"dtype": torch.float32}, "it takes bfloat16 and float16 activations, not float32"),
        ({"dtype": torch.float16}, "its experts hold bfloat16 weights, and their activations are float16"),
        ({"activation": "quick_gelu"}, "it computes silu, gelu, gelu_tanh, relu, not quick_gelu"),
        ({"format": MXFP4}, "it unpacks int8 and int4, not 4 bits, groups of 32"),
        ({"down": int4_format(48)}, "its groups are 32, 64, 128, 256, not 48"),
        ({"inner_features": 100}, "it reads 8 features at once, and 100 are no multiple of that"),
        ({"unusual": "its experts have biases"}, "its experts have biases"),
    ],
)
def test_refuses_in_words(changes, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = explain(KERNELS, request(**changes))
    assert choice.kernel == "readable"
    assert reason in dict(choice.others)["triton"]


def test_is_taken_on_cuda(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for format in (BFLOAT16, INT8, int4_format(32)):
        assert explain(KERNELS, request(format=format)).kernel == "triton"


@torch.no_grad()
def test_the_readable_kernel_computes_what_a_layer_does_one_by_one():
    config = read_config(values_of("mixtral"))
    experts = next(one for one in map(experts_of, initialize(config, seed=0).blocks) if one is not None)
    rows = torch.randn(9, config.hidden_size)
    routing = experts.route(rows)
    found = KERNELS[-1].run(weights_of(list(experts.experts)))(rows, *routing)
    torch.testing.assert_close(found, experts.one_by_one(rows, *routing))


def why(family, change=lambda experts: None, **values):
    config = replace(read_config(values_of(family)), **values)
    model = initialize(config, seed=0).to(torch.bfloat16)
    experts = next(one for one in map(experts_of, model.blocks) if one is not None)
    change(experts)
    return experts.request().unusual


def mixed(experts):
    experts.experts[1].up.to(torch.float16)


def transposed(experts):
    own = experts.experts[1].down
    own.weight = torch.nn.Parameter(own.weight.detach().t().contiguous().t())


def test_what_experts_have_that_no_kernel_computes():
    assert why("mixtral") is None
    assert why("gpt_oss") == "its experts limit what they multiply"
    assert why("gpt_oss", swiglu_limit=None, up_offset=0.0) == "its experts have biases"
    assert why("mixtral", mixed) == "its experts' weights differ in their formats"
    assert "do not lie row by row" in why("mixtral", transposed)


@pytest.mark.parametrize("rows", [1, 7, 2048])
def test_how_products_are_cut(rows):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from hasten.ops.experts.triton_experts import cut_for

    found = cut_for(rows, 8, 128, 16)
    assert found.m == {1: 0, 7: 16, 2048: 128}[rows]
    assert cut_for(rows, 8, 128, 4).m == min(found.m, 64)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 3, 17, 300])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_on_a_gpu(rows, format):
    for sizes in ({"hidden": 264, "inner": 72}, {"hidden": 2048, "inner": 768}):
        for dtype in (torch.bfloat16, torch.float16):
            case = ExpertCase(format, count=16, dtype=dtype, device="cuda", **sizes)
            given = case.rows(rows, 4)
            case.check(KERNELS[0].run(case.weights)(*given), *given)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("format", [PLAIN, ("int8", 0, True), ("int4", 32, True)], ids=str)
def test_a_captured_call_takes_other_experts_when_it_is_replayed(rows, format):
    case = ExpertCase(format, count=16, hidden=512, inner=256, dtype=torch.bfloat16, device="cuda")
    run = KERNELS[0].run(case.weights)
    held, other = case.rows(rows, 4, seed=0), case.rows(rows, 4, seed=1)
    run(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*held)
    for place, value in zip(held, other, strict=True):
        place.copy_(value)
    graph.replay()
    assert torch.equal(found, run(*other))


@pytest.mark.gpu
@needs_gpu
def test_a_layer_on_a_gpu_does_not_wait_for_it():
    config = read_config(values_of("mixtral"))
    experts = next(one for one in map(experts_of, initialize(config, seed=0).blocks) if one is not None)
    assert isinstance(experts.to("cuda", torch.bfloat16), Experts)
    x = torch.randn(1, 9, config.hidden_size, device="cuda").bfloat16()
    with torch.no_grad():
        experts(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
