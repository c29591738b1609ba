"""benchmarks/finetuning.py deepen: a model with more blocks that computes the same."""

from pathlib import Path

import pytest
import torch

import hasten
from hasten.engine.given_texts import GivenTexts
from tiny_model import tiny_llama


@pytest.fixture
def deepen(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from finetuning import Deepen

    return Deepen


def test_a_deeper_model_computes_the_same(deepen, tmp_path):
    model = tiny_llama()
    hasten.save(model, tmp_path / "model")
    layers = 3 * len(model.config.layers)
    more = deepen(model=tmp_path / "model", layers=layers, folder=tmp_path / "deep")
    (tmp_path / "deep").mkdir()  # left by one that was interrupted
    more.run()
    deep = hasten.load(tmp_path / "deep", dtype="stored")
    assert len(deep.config.layers) == layers
    prompts = [list(range(1, 20))]
    found, wanted = (GivenTexts(one, batch=1, capacity=32).prefill(prompts) for one in (deep, model))
    assert torch.equal(found, wanted)
    assert deep.blocks[1].mlp.gate.weight.abs().sum() > 0, "but for what it adds, a new block is a copy"
    with pytest.raises(SystemExit, match="is there already"):
        more.run()
    with pytest.raises(SystemExit, match="is not two or more times"):
        deepen(model=tmp_path / "model", layers=layers + 1, folder=tmp_path / "other").run()
    assert not (tmp_path / "other").exists()
