"""Stacked layers: of whatever kernel their parts were bound to, and where they may go."""

import pytest
import torch
from torch import nn

import hasten
from hasten.errors import ConfigError
from hasten.machine import find_compiler
from hasten.model.stacking import alternate, split_alternate, split_stack, stack
from hasten.ops.linear import PackedLinear
from hasten.quantization import Int4, quantize
from references import make_reference

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


def layers(count, rows, *, kernel):
    linears = [nn.Linear(96, rows, bias=False) for _ in range(count)]
    return [PackedLinear.from_linear(linear, kernel=kernel) for linear in linears]


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_parts_of_another_layout_are_packed_anew(rows, kernel):
    parts = layers(2, rows, kernel=kernel)
    weights = [part.dequantize() for part in parts]
    assert torch.equal(stack(*parts).dequantize(), torch.cat(weights))
    parts = layers(2, rows, kernel=kernel)
    weights = [part.dequantize() for part in parts]
    for together, split in ((stack(*parts), split_stack), (alternate(*parts), split_alternate)):
        sizes = [rows, rows] if split is split_stack else rows
        for part, weight in zip(split(together, sizes), weights, strict=True):
            assert torch.equal(part.weight, weight.bfloat16())


def test_a_fused_model_moves_only_after_it_was_taken_apart():
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    quantize(model, Int4(group_size=32))
    weights = {name: model.get_submodule(name).to_weight().values for name in model.quantization.layers}
    hasten.fuse(model)
    model.to("cpu")
    with pytest.raises(ConfigError, match=r"hasten.unfuse\(model\) first, then make it bfloat16 on meta"):
        model.to("meta")
    hasten.unfuse(model)
    assert all(torch.equal(model.get_submodule(name).to_weight().values, w) for name, w in weights.items())
    model.to("meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
