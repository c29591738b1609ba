"""A quantized model with Triton's kernels in their interpreter; run by test_side_by_side.py in a process of its own."""

import pytest
import torch

import hasten
from hasten.engine.given_texts import GivenTexts
from hasten.ops.linear import PackedLinear
from tiny_model import tiny_llama


@pytest.fixture(autouse=True)
def multiplies_bfloat16(processor):
    """As the GPUs do, for which the interpreter stands: elsewhere a model computes in float32."""
    processor("avx2", "avx512f", "avx512_bf16")


def model_of(scheme):
    model = tiny_llama().to(torch.bfloat16)
    hasten.quantize(model, scheme)
    return model


def use(model, *, linear, attention):
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.bind(linear)
    model.bind(attention=attention)


def steps(model):
    decoder = GivenTexts(model, batch=2, capacity=128, compiled=True)
    logits = [decoder.prefill([[5, 9, 40, 3, 77], [8, 90]])]
    logits += [decoder.decode(torch.tensor([i, i + 20])) for i in range(3)]
    return torch.stack(logits)


@pytest.mark.parametrize("scheme", [hasten.Int8(), hasten.Int4(group_size=32)])
def test_a_model_decodes_as_with_pytorchs_kernels(scheme):
    model = model_of(scheme)
    use(model, linear="pytorch", attention="sdpa")
    plain = steps(model)
    use(model, linear="reference", attention="reference")
    exact = steps(model)
    use(model, linear="triton", attention="triton")
    found = steps(model)
    assert not torch.equal(found, plain)
    assert (found - exact).square().mean() <= 4 * (plain - exact).square().mean()


def test_a_compiled_block_has_no_graph_break():
    model = model_of(hasten.Int4(group_size=32))
    use(model, linear="triton", attention="triton")
    expected = steps(model)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(steps(model), expected)
