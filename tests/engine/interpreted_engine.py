"""Captured steps over Triton's kernels in their interpreter; test_runner.py runs this file in a process of its own."""

import pytest
import torch

from captured_steps import Capturer
from drafting import proposing
from hasten.engine import captures, following, prompt_steps
from hasten.engine.prompt_steps import PromptShape
from hasten.model.fused import fuse_where_it_fits
from serving_cases import make_engine, request, run, tokens_of
from tiny_model import tiny_llama

PROMPTS = [[7, 3, 90], [18, 99, 3, 5, 61, 7, 20], [64, 29]]


@pytest.fixture(autouse=True)
def captured_and_multiplying_bfloat16(processor, monkeypatch):
    processor("avx2", "avx512f", "avx512_bf16")
    monkeypatch.setattr(following, "capture_refusal", lambda model: None)
    monkeypatch.setattr(captures, "cuda_graph", Capturer())
    monkeypatch.setattr(prompt_steps, "_SEEN", 1)
    monkeypatch.setattr(prompt_steps, "TOKENS", (8,))
    monkeypatch.setattr(prompt_steps, "_ROUNDED", 16)
    monkeypatch.setattr(prompt_steps, "SEQUENCES", (4,))


def texts(engine, **settings):
    found = run(engine, [request(str(i), row, max_new_tokens=3 + i, **settings) for i, row in enumerate(PROMPTS)])
    return [tokens_of(found[str(i)]) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("fused", [False, True])
def test_texts_are_the_plain_ones(fused):
    model = tiny_llama().to(torch.bfloat16)
    model.bind()
    if fused:
        model = fuse_where_it_fits(model)
        assert type(model.blocks[0]).__name__ == "CudaBlock"
    plain = texts(make_engine(model, capture=False))
    engine, drafted = make_engine(model), make_engine(model)
    assert engine.runner.cache.kernel.name == "triton"
    drafted.speculator = proposing(lambda sequence: [7, 3, 9][: 1 + len(sequence.tokens) % 3])
    assert texts(engine) == plain
    assert texts(drafted) == plain
    shapes = [key.shape for one in (engine, drafted) for key in one.runner.decoder.forwards()]
    assert {shape.width for shape in shapes} >= {1, 4}
    shapes = [
        key for one in (engine, drafted) for key in one.runner.decoder.captures.pieces if isinstance(key, PromptShape)
    ]
    assert shapes
    assert not engine.runner.decoder.captures.refused
    assert not drafted.runner.decoder.captures.refused
