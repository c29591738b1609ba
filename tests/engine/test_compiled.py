"""torch.compile for generation: nothing is compiled anew while decoding, whatever the weights are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import hasten
from hasten.engine.compiled import compile_blocks
from hasten.engine.given_texts import GivenTexts
from hasten.model.initialize import initialize
from hasten.model.transformer import Transformer
from hasten.planning.shapes import shape_config
from instruction_sets import needs_native
from references import make_reference

# how the model is made -> graphs: one for all blocks, one for the head; of fused blocks the first takes the
# embedding's bfloat16, the others the float32 that flows between them
GRAPHS = {"float32": 2, "bfloat16": 2, "int8": 2, "int4": 2, "fused": 2, "fused-int8": 2, "fused-int4": 2}
WAYS = [pytest.param(way, marks=needs_native) if way.startswith("fused") else way for way in GRAPHS]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(way: str) -> Transformer:
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    model = initialize(shape_config("tiny"), seed=0, dtype=dtype).eval()
    if way.endswith("int8"):
        hasten.quantize(model, hasten.Int8(lm_head="same"))
    if way.endswith("int4"):
        hasten.quantize(model, hasten.Int4(group_size=32, lm_head="same", search="minmax"))
    return hasten.fuse(model) if way.startswith("fused") else model


def graphs() -> dict[str, Any]:
    return {name: counters["stats"][name] for name in ("unique_graphs", "calls_captured")}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled_anew_while_decoding(way: str) -> None:
    model, plain = make(way), make(way)
    compile_blocks(model)
    decoder, eager = (GivenTexts(each, batch=1, capacity=64, compiled=True) for each in (model, plain))
    decoder.prefill([[1, 2, 3]])
    assert not counters["stats"], "a prompt is not compiled"
    decoder.decode(torch.tensor([4]))
    first = graphs()
    assert first["unique_graphs"] == GRAPHS[way]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (1, 7, 20, 33):
            prompt = [5 + place % 200 for place in range(length + 1)]  # one token alone would be a decode step
            decoder.truncate(0)
            eager.truncate(0)
            assert torch.equal(decoder.prefill([prompt]), eager.prefill([prompt]))
            for token in (7, 8, 9):
                got, wanted = decoder.decode(torch.tensor([token])), eager.decode(torch.tensor([token]))
                error = (got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
                assert error < (1e-5 if way == "float32" else 0.05), way
    assert graphs() == first
    assert not counters["graph_break"]


@pytest.mark.slow
def test_another_number_of_sequences_is_compiled_once() -> None:
    model = make("int8")
    compile_blocks(model)
    for batch in (2, 3):
        counters.clear()
        decoder = GivenTexts(model, batch=batch, capacity=64, compiled=True)
        decoder.prefill([[1, 2]] * batch)
        decoder.decode(torch.tensor([4] * batch))
        assert graphs()["unique_graphs"] == 2
        with torch._dynamo.config.patch(error_on_recompile=True):
            decoder.decode(torch.tensor([5] * batch), active=[True] * (batch - 1) + [False])
            decoder.decode(torch.tensor([5] * batch))


def test_models_of_one_kind_share_their_graphs() -> None:
    ours, another = make("float32"), make("float32")
    for model in (ours, another):
        compile_blocks(model)
    assert type(ours.blocks[0]) is type(another.blocks[1])
    assert type(ours.head) is type(another.head)


@pytest.mark.slow
def test_blocks_with_experts_compile_around_those_that_are_taken():
    prompt, params = [5, 6, 7, 8], {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain, compiled = (hasten.load(make_reference("mixtral"), dtype="float32") for _ in range(2))
    (expected,), (found,) = (
        hasten.generate(model, prompt, compiled=model is compiled, **params) for model in (plain, compiled)
    )
    assert found.tokens == expected.tokens
