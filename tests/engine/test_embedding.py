"""What comes out of the last block, and its embeddings: the same forward pass as scoring, sparse or fused."""

import copy

import pytest
import torch

import hasten
from hasten.engine.runner import ModelRunner, embed
from hasten.model.context import training_context
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.ops.native import library
from references import tiny_llama

TOKENS = torch.randint(3, 250, (1, 48), generator=torch.Generator().manual_seed(0))
PATTERN = {"hasten": {"attention_pattern": pattern_values(parse_pattern("sliding-window:block=16,window=1"))}}


def both(model):
    """Scores, and the states they are made of."""
    arguments = (TOKENS, torch.arange(TOKENS.shape[1])[None], training_context(model, TOKENS.shape[1]))
    with torch.no_grad():
        return model(*arguments), model.states(*arguments)


@pytest.mark.parametrize("changes", [{}, PATTERN], ids=["dense", "sparse"])
def test_states_are_what_the_head_scores(changes):
    model = tiny_llama(**changes)
    scores, states = both(model)
    torch.testing.assert_close(model.logits(model.norm(states)), scores, rtol=0, atol=0)
    last = embed(ModelRunner(model, None), TOKENS[0].tolist(), pooling="last", max_length=48)
    torch.testing.assert_close(last, model.norm(states)[0, -1])


def test_a_pattern_changes_the_embedding():
    models = (tiny_llama(**changes) for changes in ({}, PATTERN))
    dense, sparse = (
        embed(ModelRunner(model, None), TOKENS[0].tolist(), pooling="mean", max_length=48) for model in models
    )
    assert (dense - sparse).abs().max() > 0.01


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
def test_a_fused_model_has_the_states_of_a_plain_one():
    plain = tiny_llama().to(torch.bfloat16)
    exact = both(copy.deepcopy(plain).float())[1]
    allowed = 2 * (both(plain)[1].float() - exact).square().mean().sqrt()
    states = both(hasten.fuse(plain))[1]
    assert (states.dtype, states.shape) == (torch.float32, exact.shape)
    assert (states - exact).square().mean().sqrt() <= allowed
