"""Vocabulary padding changes the speed and nothing else."""

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.errors import ConfigError
from hasten.model.context import TrainingContext
from references import CASES, make_reference

TOKENS = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(0))


def run(model, **options):
    context = TrainingContext([layer.window for layer in model.config.layers])
    return model(TOKENS, torch.arange(12).expand(2, -1), context, **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-mqa", "gemma2"])
@pytest.mark.parametrize("multiple", [1, 7, 64, 101, 256])
@torch.no_grad()
def test_logits_stay_the_same(name, multiple):
    model = hasten.load(make_reference(name))
    expected = run(model)
    tied = model.head.weight is model.embedding.weight
    assert hasten.pad_vocabulary(model, multiple) is model
    rows = -(-101 // multiple) * multiple
    assert model.config.padded_vocab_size == rows
    assert model.embedding.weight.shape[0] == model.head.weight.shape[0] == rows
    assert (model.head.weight is model.embedding.weight) == tied
    assert not model.embedding.weight[101:].any()
    assert not model.head.weight[101:].any()
    found = run(model)
    assert found.shape == expected.shape == (2, 12, 101)
    # The same products summed in float32, perhaps in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padding_again_and_taking_it_off():
    model = hasten.load(make_reference("llama"))
    embedding, head = model.embedding.weight.clone(), model.head.weight.clone()
    for multiple in (64, 64, 50, 1):
        hasten.pad_vocabulary(model, multiple)
    assert torch.equal(model.embedding.weight, embedding)
    assert torch.equal(model.head.weight, head)
    parameter = model.embedding.weight
    assert hasten.pad_vocabulary(model, 1).embedding.weight is parameter  # nothing to do, nothing copied


def test_training_leaves_the_padding_zero_and_the_loss_the_same():
    plain, padded = hasten.load(make_reference("llama")), hasten.pad_vocabulary(hasten.load(make_reference("llama")))
    targets = TOKENS.roll(-1, 1)
    torch.testing.assert_close(run(plain, targets=targets), run(padded, targets=targets), rtol=1e-6, atol=0)
    optimizer = torch.optim.AdamW(padded.parameters(), lr=0.1, weight_decay=0.1)
    run(padded, targets=targets).backward()
    optimizer.step()
    assert not padded.head.weight[101:].any()
    assert not padded.embedding.weight[101:].any()
    assert padded.head.weight[:101].abs().sum() > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_export_takes_the_padding_off(name, tmp_path):
    model = hasten.pad_vocabulary(hasten.load(make_reference(name)))
    hasten.save(model, tmp_path)
    shapes = {tensor.shape[0] for key, tensor in load_file(tmp_path / "model.safetensors").items() if "wte" in key}
    assert shapes <= {101}
    again = hasten.load(tmp_path, dtype="stored")
    assert again.config.padded_vocab_size == again.config.vocab_size == CASES[name][2]["vocab_size"]
    with torch.no_grad():
        torch.testing.assert_close(run(again), run(model), rtol=1e-5, atol=1e-5)


def test_padding_keeps_dtype_and_frozen_weights():
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    model.requires_grad_(False)
    hasten.pad_vocabulary(model)
    assert model.head.weight.dtype == torch.bfloat16
    assert not model.head.weight.requires_grad


@pytest.mark.parametrize("multiple", [0, -64, 2.5, True, "64"])
def test_a_multiple_that_cannot_be(multiple):
    with pytest.raises(ConfigError, match="multiple"):
        hasten.pad_vocabulary(hasten.load(make_reference("llama")), multiple)


def test_an_absurd_multiple_and_a_folder_that_is_none_are_refused():
    from hasten.errors import ConfigError
    from references import tiny_llama

    model = tiny_llama()
    with pytest.raises(ConfigError, match="multiple"):
        hasten.pad_vocabulary(model, 10**12)
    with pytest.raises(ConfigError, match="folder"):
        hasten.save(model, None)
