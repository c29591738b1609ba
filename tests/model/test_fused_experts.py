"""Fused blocks with experts: one native call of all of them, where their formats allow it."""

import pytest
import torch

import hasten
from combinations import combinations
from fused_cases import whole
from hasten.model import fused_native
from hasten.model.context import TrainingContext
from hasten.model.fused import fuse, unfuse
from hasten.model.fused_native import FusedBlock
from hasten.ops.linear import PackedLinear
from hasten.ops.native import library
from hasten.quantization.schemes import Mixed, layers_to_quantize
from references import make_reference

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
SCHEMES = {
    "bfloat16": None,
    "int8": hasten.Int8(),
    "int4": hasten.Int4(group_size=32),
    "int4 float activations": hasten.Int4(group_size=32, activations="float"),
}


def fused(family, scheme):
    model = hasten.load(make_reference(family), dtype="bfloat16")
    return fuse(model if scheme is None else hasten.quantize(model, scheme))


def in_float32(family, scheme):
    """The readable model with the same numbers, all of it in float32."""
    model = hasten.load(make_reference(family), dtype="bfloat16")
    model = model if scheme is None else hasten.quantize(model, scheme)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, PackedLinear) and name.startswith("blocks."):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight.data = layer.dequantize()
            if layer.bias is not None:
                plain.bias.data = layer.bias
            model.set_submodule(name, plain)
    model.float().bind()
    return model


def with_experts(model):
    return [block for block in model.blocks if isinstance(block, FusedBlock) and block.experts is not None]


def apart(model, monkeypatch):
    """The model with its experts called apart from its blocks, each choosing in Python."""
    with monkeypatch.context() as patch:
        patch.setattr(fused_native, "routing_of", lambda experts: None)
        for block in with_experts(model):
            block.bind()
    return model


@torch.no_grad()
def each_alone(model, shape):
    """What each block gives of the same random states (B, T, C)."""
    x = torch.randn(*shape, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    context = TrainingContext([layer.window for layer in model.config.layers])
    positions = torch.arange(shape[1]).expand(shape)
    ropes = [table(positions, context.stretched) for table in model.ropes]
    blocks = zip(model.blocks, model.config.layers, context.layers, strict=True)
    return [block(x, None if layer.rope is None else ropes[layer.rope], own) for block, layer, own in blocks]


FAMILIES = ["mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "dots1", "gpt_oss", "minimax_m2", "granitemoe"]
FAMILIES += ["ernie4_5_moe", "gemma4_text-experts"]


@pytest.mark.parametrize(("family", "scheme"), combinations(FAMILIES, list(SCHEMES)))
def test_a_block_with_experts_in_one_call_gives_what_its_steps_give(family, scheme, monkeypatch):
    joined, steps = fused(family, SCHEMES[scheme]), apart(fused(family, SCHEMES[scheme]), monkeypatch)
    assert [block.joins_experts for block in with_experts(joined)] == [True] * len(with_experts(joined))
    assert not any(block.joins_experts for block in with_experts(steps))
    precise = in_float32(family, SCHEMES[scheme])
    for shape in ((1, 1), (3, 1), (2, 37)):
        blocks = zip(each_alone(joined, shape), each_alone(steps, shape), each_alone(precise, shape), strict=True)
        for found, expected, exact in blocks:
            # A processor with products of bfloat16 rounds what it multiplies. In the call, what the MLP beside the
            # experts gives is rounded with its gate, and before it in steps: neither may be further from exact results.
            error, limit = (found - exact).abs().max(), 2 * (expected - exact).abs().max()
            close = 1e-4 * (1 + expected.abs().max())
            assert (found - expected).abs().max() <= close or error <= limit, (error, limit)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_called_apart_give_what_they_give_one_by_one(scheme, monkeypatch):
    model = apart(fused("qwen2_moe", SCHEMES[scheme]), monkeypatch)
    for block in with_experts(model):
        for shape in ((1, 1), (3, 1), (2, 37)):
            x = torch.randn(*shape, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                expected, found = block.experts(x), block._bound.experts(x)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_experts_of_several_formats_are_computed_one_by_one():
    model = hasten.load(make_reference("mixtral"), dtype="bfloat16")
    table = {name: "int8" if ".experts.0." in name else "int4-g32" for name in layers_to_quantize(model)}
    model = fuse(hasten.quantize(model, Mixed(table=table)))
    assert not any(block.joins_experts or block._bound.experts for block in with_experts(model))
    assert whole(model).isfinite().all()


def test_other_weights_are_taken_after_they_were_loaded():
    """The plan of the experts holds addresses: loading, copying and unfusing must not leave old ones behind."""
    model = fused("qwen3_moe", None)
    state = {name: tensor * 0.5 if "experts" in name else tensor for name, tensor in unfuse(model).state_dict().items()}
    changed = hasten.load(make_reference("qwen3_moe"), dtype="bfloat16")
    changed.load_state_dict(state)
    expected = with_experts(fuse(changed))
    model.load_state_dict(state)
    for one, other in zip(expected, with_experts(fuse(model)), strict=True):
        assert one.joins_experts
        assert other.joins_experts
    for one, other in zip(each_alone(changed, (1, 5)), each_alone(model, (1, 5)), strict=True):
        assert torch.equal(one, other)
