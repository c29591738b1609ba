"""Steps of models with few layers of attention are timed for a plan: their first layers may all keep states."""

import math

import pytest

from hasten.bench.predict import generating_seconds
from hasten.model.families import read_config
from hasten.planning.memory import InferenceUse
from references import values_of


@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid", "nemotron_h", "qwen3_next"])
def test_layers_that_keep_states_are_timed_with_one_that_attends(family, monkeypatch):
    monkeypatch.setattr("hasten.bench.predict.last_level_cache_bytes", lambda: 1)  # as few layers as can be
    config = read_config(values_of(family) | {"num_hidden_layers": 4})
    use = InferenceUse(batch_size=1, length=24, new_tokens=8, weights=1, dtype="float32", step=16, row_bytes=1)
    found = generating_seconds(config, use, [1], "float32", cache="auto", served=False)
    assert found is not None
    assert math.isfinite(found.prompt + found.steps[1])
    assert min(found.prompt, found.steps[1]) > 0
