"""Stacked layers: of whatever kernel their parts were bound to, and where they may go."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import hasten
from hasten.errors import ConfigError, HastenWarning
from hasten.machine import find_compiler
from hasten.model.fused import FusedBlock, fuse, fuse_where_it_fits, refusal
from hasten.model.fused_linear import gate_up_rows, interleave_gate_up, part_of
from hasten.model.mlp import Linear
from hasten.model.transformer import Block
from hasten.ops.linear import PackedLinear, QuantizedWeight, int4_format
from hasten.quantization import Int4, quantize
from linear_cases import make_weight, random_weight
from quantized_folders import logits
from references import make_reference, tiny_llama
from rounded import round_int4, round_int8

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


def layers(count, rows, *, kernel):
    linears = [nn.Linear(96, rows, bias=False) for _ in range(count)]
    return [PackedLinear.from_linear(linear, kernel=kernel) for linear in linears]


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_parts_of_another_layout_are_packed_anew(rows, kernel):
    parts = layers(2, rows, kernel=kernel)
    weights = [part.dequantize() for part in parts]
    together = interleave_gate_up(*parts)
    for place, weight in zip(gate_up_rows(rows), weights, strict=True):
        assert torch.equal(part_of(together, place).weight, weight.bfloat16())


def test_a_fused_model_moves_only_after_it_was_taken_apart():
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    quantize(model, Int4(group_size=32))
    weights = {name: model.get_submodule(name).to_weight().values for name in model.quantization}
    hasten.fuse(model)
    model.to("cpu")
    with pytest.raises(ConfigError, match=r"hasten.unfuse\(model\) first, then make it bfloat16 on meta"):
        model.to("meta")
    hasten.unfuse(model)
    assert all(torch.equal(model.get_submodule(name).to_weight().values, w) for name, w in weights.items())
    model.to("meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def unlike(which):
    """A quantized model of which one block has one layer of another kind: as some published folders are mixed."""
    model = quantize(tiny_llama().to(torch.bfloat16), Int4(group_size=32))
    attention, mlp = model.blocks[1].attention, model.blocks[1].mlp
    owner, name = (mlp, "up") if "up" in which.split() else (attention, "k")
    layer = getattr(owner, name)
    exact = layer.dequantize()
    other = {
        "plain": lambda: plain_linear(exact),
        "int8": lambda: PackedLinear.from_weight(round_int8(exact)),
        "in groups of 64": lambda: PackedLinear.from_weight(round_int4(exact, group_size=64)),
        "with zero points": lambda: PackedLinear.from_weight(round_int4(exact, group_size=32, symmetric=False)),
        "of float activations": lambda: PackedLinear.from_weight(layer.to_weight(), activations="float"),
        "with a bias": lambda: PackedLinear.from_weight(layer.to_weight(), torch.ones(exact.shape[0])),
        "with float16 scales": lambda: PackedLinear.from_weight(
            round_int4(exact, group_size=32, scale_dtype=torch.float16)
        ),
    }
    setattr(owner, name, other[" ".join(word for word in which.split() if word != name)]())
    return model


def plain_linear(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    return linear


OTHERS = (
    *("plain k", "plain up", "int8 k", "int8 up", "k in groups of 64", "k with zero points"),
    *("k of float activations", "up of float activations", "k with a bias", "up with a bias", "k with float16 scales"),
)


@pytest.mark.parametrize("which", OTHERS)
def test_layers_of_one_input_may_differ_in_everything(which):
    model = unlike(which)
    names = [f"blocks.1.{name}" for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")]
    expected, weights = exact_logits(model), {name: numbers(model.get_submodule(name)) for name in names}
    error = (logits(model) - expected).std()
    assert refusal(model) is None
    assert fuse_where_it_fits(model) is model
    assert all(isinstance(block, FusedBlock) for block in model.blocks)
    assert (logits(model) - expected).std() < 1.5 * error
    hasten.unfuse(model)
    for name, weight in weights.items():
        assert torch.equal(numbers(model.get_submodule(name)), weight), name


def exact_logits(model):
    """In float32, of the numbers that the layers hold."""
    plain = tiny_llama()
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data.copy_(numbers(module))
            if module.bias is not None:
                linear.bias.data.copy_(module.bias)
            plain.set_submodule(name, linear)
    plain.embedding.weight.data.copy_(model.embedding.weight)
    plain.bind()
    return logits(plain)


def numbers(linear):
    return linear.dequantize() if isinstance(linear, PackedLinear) else linear.weight.detach()


def test_a_layer_that_the_native_kernel_cannot_serve_is_a_reason_before_anything_is_changed():
    model = tiny_llama().to(torch.bfloat16)
    weight = QuantizedWeight(
        format=int4_format(48),
        values=torch.zeros(64, 64, dtype=torch.uint8),
        scales=torch.ones(64, 2, dtype=torch.bfloat16),
    )
    with pytest.warns(HastenWarning, match="multiples of 32"):
        model.blocks[1].attention.output = PackedLinear.from_weight(weight)
    with pytest.raises(ConfigError, match=r"blocks.1.attention.output: its groups are multiples of 32, not 48"):
        hasten.fuse(model)
    assert all(isinstance(block, Block) for block in model.blocks)


@pytest.mark.parametrize("name", ["int8 g32", "fp8 g128", "Q4_K", "Q6_K"])
def test_every_format_that_is_read_fuses_and_comes_apart_with_the_same_numbers(name):
    model = tiny_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1).to(torch.bfloat16)
    block, numbers = model.blocks[0], {}
    for part in ("attention.q", "attention.k", "attention.v", "attention.output", "mlp.gate", "mlp.up", "mlp.down"):
        linear = block.get_submodule(part)
        if name == "int8 g32":
            numbers[part] = make_weight(*linear.weight.shape, format="int8", group_size=32, symmetric=False)
            numbers[part] = replace(numbers[part], scales=numbers[part].scales / 1000)
        else:
            numbers[part] = random_weight(name, *linear.weight.shape)
        block.set_submodule(part, PackedLinear.from_weight(numbers[part], activations="float"))
    expected = logits(model)
    assert isinstance(fuse(model).blocks[0], FusedBlock)
    assert (logits(model) - expected).std() < 0.02 * expected.std()
    hasten.unfuse(model)
    for part, weight in numbers.items():
        assert torch.equal(model.blocks[0].get_submodule(part).dequantize(), weight.dequantize())
