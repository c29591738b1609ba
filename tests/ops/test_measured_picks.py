"""A native kernel that loses clearly to PyTorch's on this processor is not taken, and explain gives both times."""

from dataclasses import replace

import pytest
import torch

import hasten
from hasten.model import fused
from hasten.ops.activation import operator as activation
from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec, native_kernels
from hasten.ops.linear import BFLOAT16, INT8, int4_format
from hasten.ops.linear import operator as linear
from hasten.ops.picker import explain, pick
from instruction_sets import needs_native

pytestmark = needs_native
CPU = torch.device("cpu")
REQUESTS = {
    "attention": (
        native_kernels,
        KERNELS,
        AttentionRequest(
            spec=AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.25), device=CPU, dtype=torch.float32
        ),
    ),
    "activation": (activation, activation.KERNELS, activation.ActivationRequest(device=CPU, dtype=torch.float32)),
    "linear": (
        linear,
        linear.KERNELS,
        linear.LinearRequest(device=CPU, dtype=torch.bfloat16, format=BFLOAT16, in_features=64),
    ),
}


@pytest.fixture
def times(monkeypatch):
    """`times(native, theirs)`: what every comparison finds, in seconds."""

    def found(native, theirs):
        monkeypatch.setattr("hasten.ops.native.compare", lambda *_, **__: {"native": native, "PyTorch's": theirs})

    return found


@pytest.mark.parametrize("operator", REQUESTS)
def test_only_a_kernel_that_is_clearly_slower_is_left(operator, times):
    _, kernels, request = REQUESTS[operator]
    times(1.2e-3, 1e-3)
    assert pick(kernels, request).name == "native"
    times(4e-3, 1e-3)
    choice = explain(kernels, request)
    assert choice.kernel != "native"
    assert dict(choice.others)["native"] == "measured here, native takes 4.00 ms where PyTorch's takes 1.00 ms"
    assert pick(kernels, request, forced="native").name == "native", "asked for by name it serves"


@pytest.mark.parametrize("operator", REQUESTS)
def test_the_contenders_compute_the_same(operator):
    module, *_ = REQUESTS[operator]
    arguments = {"attention": (torch.float32, True), "activation": (torch.float32,), "linear": ()}[operator]
    found = [call() for call in module._contenders(*arguments).values()]
    if operator == "linear":
        found = [(prompt, *rows) for prompt, rows in found]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.02 * float(theirs.float().std()))


def test_a_model_stays_readable_where_native_products_lose(tiny, times):
    model = tiny.bfloat16()
    times(4e-3, 1e-3)
    assert model is fused.fuse_where_it_fits(model)
    assert model.readable
    reasons = [other.reason for b in hasten.explain(model) if b.operator == "block" for other in b.others]
    assert set(reasons) == {"measured here, native takes 4.00 ms where PyTorch's takes 1.00 ms"}
    hasten.fuse(model)  # asked for
    assert not model.readable


def test_only_products_of_bfloat16_weights_on_a_cpu_are_measured(times):
    times(4e-3, 1e-3)
    opt_in = linear.KERNELS[0].opt_in_reason
    request = REQUESTS["linear"][2]
    assert "measured here" in opt_in(request)
    for changes in ({"format": INT8}, {"format": int4_format(32)}, {"device": torch.device("meta")}):
        assert opt_in(replace(request, **changes)) is None


@pytest.mark.parametrize("reason", [None, "it is emulated"])
def test_contenders_are_what_the_reason_says_and_pytorchs_is_its_faster_one(reason, monkeypatch):
    called = []

    def watch(name, product):
        def watched(x, weight):
            called.append((name, x.shape[0], (weight.out_features, x.shape[1])))
            return product(x, weight)

        monkeypatch.setattr(linear, name, watched)

    watch("pytorch", linear.pytorch)
    watch("float32", lambda x, weight, pytorch=linear.pytorch: pytorch(x, weight))
    monkeypatch.setattr(linear, "emulated", lambda dtype: reason)
    said = []
    monkeypatch.setattr(linear, "slower_than_pytorch", lambda what, contenders: said.append((what, contenders())))
    linear.native_opt_in(REQUESTS["linear"][2])
    ((what, contenders),) = said
    for contender in contenders.values():
        prompt, rows = contender()
        assert (prompt.shape, [row.shape for row in rows]) == ((64, 4096), [(1, 4096)] * 16)
    assert what == "products of 64 rows and 16 times one by 4096 × 1024 bfloat16 weights"
    name = "pytorch" if reason is None else "float32"
    assert [one for one in called if one[0] == name] == [(name, 64, (4096, 1024)), *[(name, 1, (4096, 1024))] * 16]
