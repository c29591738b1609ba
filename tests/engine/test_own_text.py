"""Calibration text that a model writes: samples of one length, by a seed, that begin as its texts do."""

import pytest
import torch

import hasten
from hasten.engine.own_text import BATCH, own_text
from hasten.errors import ConfigError
from hasten.quantization.calibration import check_calibration


@pytest.fixture
def model(tiny_folder):
    return hasten.load(tiny_folder)


def test_samples_are_drawn_by_the_seed(model):
    done = []
    first = own_text(model, samples=5, length=12, progress=lambda *count: done.append(count))
    assert first.shape == (5, 12)
    assert done == [(5, 5)]
    assert torch.equal(check_calibration(first, model.config.vocab_size, 256), first)
    assert torch.equal(own_text(model, samples=5, length=12), first)
    assert not torch.equal(own_text(model, samples=5, length=12, seed=1), first)
    assert len({tuple(row) for row in first.tolist()}) == 5
    assert len(own_text(model, samples=BATCH + 1, length=3)) == BATCH + 1


def test_a_sample_begins_as_the_tokenizer_begins_a_text(model, monkeypatch):
    monkeypatch.setattr(type(model.tokenizer), "encode", lambda *_, **__: [7, 5])
    assert own_text(model, samples=3, length=4)[:, :2].tolist() == [[7, 5]] * 3
    with pytest.raises(ConfigError, match="length must be above the 2 tokens before a text; found 2"):
        own_text(model, samples=3, length=2)


def test_what_cannot_be_is_one_clear_error(model):
    with pytest.raises(ConfigError, match="calibration samples must be a whole number, at least 1"):
        own_text(model, samples=0)
    with pytest.raises(ConfigError, match="positions; found a calibration length of 100000"):
        own_text(model, length=100_000)
    model.tokenizer = None
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        own_text(model)
