"""Logits and greedy tokens of our models and of transformers', and how far apart they may be."""

import torch

import hasten
from hasten.model.context import TrainingContext

PROMPTS = [[5, 17, 42, 8, 99, 3, 71, 23, 64, 12, 55, 31, 77, 9], [33, 4, 90]]
TOLERANCE = 1e-4


def our_logits(model, tokens):
    """Logits (T, V) of one prompt in a single pass without a cache."""
    x = torch.tensor([tokens])
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(x, torch.arange(len(tokens))[None], context)[0]


def reference_logits(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0].float()


def reference_greedy(reference, tokens, count):
    out = reference.generate(
        torch.tensor([tokens]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(tokens) :].tolist()


def our_greedy(model, tokens, count):
    params = hasten.SamplingParams(temperature=0.0, max_new_tokens=count, min_new_tokens=count)
    return hasten.generate(model, [tokens], params)[0].tokens


def assert_same(model, reference):
    for tokens in PROMPTS:
        expected = reference_logits(reference, tokens)
        assert 0.2 < expected.std() < 30
        found = our_logits(model, tokens)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= TOLERANCE


def assert_exported(folder, reference):
    """An exported folder has the reference's logits in transformers and here; returns both models."""
    import transformers

    every = transformers.AutoModelForCausalLM  # but Mistral 4, which transformers has in its wrapper only
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = every if type(config) in every._model_mapping else type(reference)
    again = kind.from_pretrained(folder, dtype=torch.float32).eval()
    model = hasten.load(folder, dtype="stored")
    assert_same(model, reference)
    for tokens in PROMPTS:
        assert (reference_logits(again, tokens) - reference_logits(reference, tokens)).abs().max() <= TOLERANCE
    return again, model
