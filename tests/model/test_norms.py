"""Norms without weights, and activations that learn: what they have that no other family's have."""

import torch
import torch.nn.functional as F

import hasten
from hasten.model.activations import XIELU
from hasten.model.context import TrainingContext
from hasten.model.draft import can_draft_in_one_call
from hasten.model.initialize import initialize
from hasten.model.norms import RMSNorm
from parity import PROMPTS
from references import make_reference


def test_norms_without_weights_follow_the_model():
    model = hasten.load(make_reference("nanochat"), dtype="bfloat16")
    assert not any("norm" in name for name in model.state_dict())
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 2 + 4 * 4
    for dtype in (torch.bfloat16, torch.float32):
        assert model.to(dtype).dtype == dtype
        assert {norm.weight.dtype for norm in norms} == {dtype}
    model.to_empty(device="cpu")
    assert all((norm.weight == 1).all() for norm in norms)
    assert initialize(model.config, seed=0, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_model_that_normalises_its_embedding_does_not_draft_in_one_call():
    model = hasten.load(make_reference("nanochat"), dtype="bfloat16")
    if hasten.model.fused.refusal(model) is None:
        assert not can_draft_in_one_call(hasten.fuse(model))


def test_gradients_of_xielu_are_those_of_transformers():
    reference, tokens = make_reference("apertus"), torch.tensor([PROMPTS[0]])
    model = hasten.load(reference)
    F.cross_entropy(reference(tokens).logits[0], tokens[0]).backward()
    F.cross_entropy(
        model(tokens, torch.arange(tokens.shape[1])[None], TrainingContext([None] * 4))[0], tokens[0]
    ).backward()
    for block, layer in zip(model.blocks, reference.model.layers, strict=True):
        for name in ("alpha_p", "alpha_n"):
            found, expected = (getattr(one, name).grad for one in (block.mlp.activation, layer.mlp.act_fn))
            assert expected.abs() > 1e-6
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


def test_a_new_xielu_begins_as_published():
    config = hasten.load(make_reference("apertus")).config
    activation = initialize(config, seed=0).blocks[0].mlp.activation
    assert isinstance(activation, XIELU)
    torch.testing.assert_close(torch.cat(activation.factors()), torch.tensor([0.8, 0.8]))
