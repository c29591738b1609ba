"""Steps of models with few layers of attention are timed for a plan: their first layers may all keep states."""

import math
from dataclasses import replace

import pytest

from hasten.bench import predict
from hasten.bench.predict import generating_seconds
from hasten.model.families import read_config
from hasten.planning.memory import InferenceUse
from references import values_of


@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid", "nemotron_h", "qwen3_next"])
def test_layers_that_keep_states_are_timed_with_one_that_attends(family, monkeypatch):
    monkeypatch.setattr("hasten.bench.predict.last_level_cache_bytes", lambda: 1)  # as few layers as can be
    config = read_config(values_of(family))
    use = InferenceUse(batch_size=1, length=24, new_tokens=8, weights=1, dtype="float32", step=16, row_bytes=1)
    found = generating_seconds(config, use, [1], "float32", cache="auto", served=False)
    assert found is not None
    assert math.isfinite(found.prompt + found.steps[1])
    assert min(found.prompt, found.steps[1]) > 0


@pytest.mark.parametrize(
    ("family", "pattern", "timed"),
    [
        ("nemotron_h-dense", "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 19),  # Nemotron-H 8B
        ("granitemoehybrid-dense", "MMMMM*MMMMMMMMM*MMMMMMMMM*MMMMMMMMM*MMMM", 16),  # Granite 4 H
    ],
)
def test_time_of_context_is_that_of_the_layers_with_attention(family, pattern, timed, monkeypatch):
    config = read_config(values_of(family))
    kinds = {"M": next(layer for layer in config.layers if layer.keeps_state)}
    kinds["*"] = next(layer for layer in config.layers if layer.attends)
    kinds["-"] = next(layer for layer in config.layers if layer.mlp)
    config = replace(config, layers=tuple(kinds[kind] for kind in pattern))
    models = []

    def prompt_seconds(model, length, most):
        models.append(model.config.layers)
        return 1.0

    monkeypatch.setattr(predict, "last_level_cache_bytes", lambda: 1)
    monkeypatch.setattr(predict, "prompt_seconds", prompt_seconds)
    monkeypatch.setattr(predict, "engine_step", lambda model, sequences: 0.0)
    monkeypatch.setattr(predict, "token_seconds", lambda model, *_: sum(layer.attends for layer in model.config.layers))
    use = InferenceUse(length=24, new_tokens=8, weights=1, dtype="float32", step=16, row_bytes=1)
    found = generating_seconds(config, use, [3], "float32", cache="auto", served=True)
    assert found.steps == {3: pytest.approx(3 * 20 * 4)}  # four layers with attention, 20 tokens of context
    whole, half = models
    assert (len(whole), len(half)) == (timed, timed // 2)
    assert any(layer.attends for layer in half)
    assert any(layer.attends for layer in whole[len(half) :])
