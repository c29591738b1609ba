"""Float16 weights in the native fused steps: kept as they are, with activations that cannot overflow."""

import pytest
import torch

import hasten
from hasten.engine.given_texts import GivenTexts
from hasten.machine import find_compiler
from hasten.model.fused import FusedBlock, fuse
from hasten.ops.linear import PackedLinear
from quantized_folders import logits
from references import make_reference

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


def decoded(model):
    decoder = GivenTexts(model, batch=2, capacity=32)
    found = [decoder.prefill([[7, 3, 90, 41, 12], [18, 99]])]
    found += [decoder.decode(torch.tensor([i, i + 20])) for i in range(3)]
    return torch.stack(found)


@pytest.mark.parametrize(
    "family",
    ["gpt2", "llama-biases", "qwen3", "gemma2", "mixtral", "gemma4_text-shared", "granitemoehybrid-dense"],
)
def test_a_float16_model_is_fused_as_it_is(family):
    reference = make_reference(family)
    exact = hasten.load(reference, dtype="float16").float()
    exact.bind()
    narrow = hasten.load(make_reference(family), dtype="bfloat16")
    model = hasten.load(make_reference(family), dtype="float16")
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected, rounded = decoded(exact), decoded(fuse(narrow))
    fuse(model)
    assert all(isinstance(block, FusedBlock) for block in model.blocks)
    assert {m.format.element for m in model.modules() if isinstance(m, PackedLinear)} == {"float16"}
    assert model.compute_dtype == torch.bfloat16
    error = (decoded(model) - expected).square().mean().sqrt()
    assert error <= (rounded - expected).square().mean().sqrt()  # of bfloat16 weights, which have fewer digits
    hasten.unfuse(model)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_activations_beyond_float16_do_not_overflow():
    model = hasten.load(make_reference("llama"), dtype="float16")
    with torch.no_grad():
        for parameter in (model.blocks[0].mlp.up.weight, model.blocks[0].mlp.gate.weight):
            parameter.mul_(2000)
    assert logits(fuse(model)).isfinite().all()


def test_a_quantized_model_in_float16_is_fused():
    model = hasten.quantize(hasten.load(make_reference("llama"), dtype="float16"), hasten.Int4(group_size=32))
    assert all(isinstance(block, FusedBlock) for block in fuse(model).blocks)
    assert logits(model).isfinite().all()
