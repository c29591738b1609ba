"""Fused blocks with experts: one native call of all of them, where their formats allow it."""

import pytest
import torch

import hasten
from fused_cases import whole
from hasten.model.fused import fuse, unfuse
from hasten.model.fused_native import FusedBlock
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


def with_experts(model):
    return [block for block in model.blocks if isinstance(block, FusedBlock) and block.experts is not None]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_call_gives_what_the_experts_give_one_by_one(family, scheme):
    model = fused(family, SCHEMES[scheme])
    assert with_experts(model)
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
    assert [block._bound.experts for block in with_experts(model)] == [None] * len(model.blocks)
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
        x = torch.randn(1, 5, model.config.hidden_size)
        assert torch.equal(one._bound.experts(x), other._bound.experts(x))
