"""Checkpoints with towers: the text model alone is loaded, and computes what the whole one computes for text."""

import json

import pytest
import torch

import hasten
from hasten.errors import HastenWarning
from hasten.model.families import FAMILIES
from hasten.model.families.wrapped import WRAPPERS
from parity import PROMPTS, TOLERANCE, assert_same, our_greedy, our_logits, reference_greedy, reference_logits
from wrapped_models import WRAPPED, make_wrapped

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=list(WRAPPED))
def wrapped(request):
    return request.param


def load(source, **options):
    with pytest.warns(HastenWarning, match=r"skipped \d+ tensors of the (vision tower|projector).*runs the text model"):
        return hasten.load(source, **options)


def test_every_wrapper_has_a_case():
    assert set(WRAPPED) == set(WRAPPERS)


def test_folder_gives_the_logits_and_tokens_of_the_whole_model(wrapped, tmp_path):
    reference = make_wrapped(wrapped)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype="float32")
    assert model.config.family in FAMILIES
    assert_same(model, reference)
    for tokens in PROMPTS:
        assert our_greedy(model, tokens, 32) == reference_greedy(reference, tokens, 32)


def test_model_in_memory_is_taken_over(wrapped):
    reference = make_wrapped(wrapped)
    model = load(reference)
    assert_same(model, reference)
    storages = {t.untyped_storage().data_ptr() for t in reference.state_dict().values()}
    assert all(p.untyped_storage().data_ptr() in storages for p in model.parameters())


def test_export_is_the_plain_text_model(wrapped, tmp_path):
    reference = make_wrapped(wrapped)
    hasten.save(load(reference), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] in FAMILIES
    assert "text_config" not in values
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = hasten.load(tmp_path, dtype="stored")
    for tokens in PROMPTS:
        expected = reference_logits(reference, tokens)
        assert (reference_logits(again, tokens) - expected).abs().max() <= TOLERANCE
        assert (our_logits(model, tokens) - expected).abs().max() <= TOLERANCE
