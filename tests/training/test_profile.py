"""`hasten train --profile`: what is counted adds up, and the run's folder is not touched."""

import json

import pytest
import torch

from hasten.cli.main import main
from hasten.planning.cost import training_flops_per_token
from hasten.training.build import shape_config
from hasten.training.profile import PartTime, StepProfile, profile
from hasten.training.recipes import RECIPES


def test_parts_operators_and_flops_of_a_step(recipe, tmp_path):
    made = recipe(precision="float32", attention="reference", accumulation=2)
    found = profile(made, tmp_path / "profile", progress=False)
    names = [part.name for part in found.parts]
    assert names == ["embedding", "blocks", "norm", "head and loss", "update", "between"]
    parts = dict(zip(names, found.parts, strict=True))
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.seconds, rel=0.01)
    assert all(part.seconds > 0 for part in found.parts[:-1])
    assert found.tokens == 2 * 4 * 32
    config = shape_config(made.model, vocab_size=300, positions=32)
    whole = training_flops_per_token(config, 32) * found.tokens
    # The counter counts what is hidden by the causal mask too, and neither norms nor the embedding.
    counted = sum(part.flops for part in found.parts)
    assert 0.9 * whole < counted < 1.5 * whole
    assert parts["blocks"].flops > parts["head and loss"].flops > 0
    assert parts["norm"].flops == parts["update"].flops == 0
    assert found.operators[0].seconds >= found.operators[-1].seconds > 0
    trace = json.loads((tmp_path / "profile" / "trace.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])
    stored = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert stored["next_gain"] == found.next_gain()
    assert not (tmp_path / "runs" / "tiny" / "checkpoints").exists()


def test_compiled_blocks_are_measured_too(recipe, tmp_path):
    found = profile(recipe(compile=True, attention="reference"), tmp_path / "profile", progress=False)
    assert found.parts[1].flops > 0, "counted on a step that is not compiled"
    torch._dynamo.reset()


def test_the_next_gain_is_where_most_time_is_above_the_limit(tmp_path):
    def part(name, seconds, limit):
        return PartTime(name=name, seconds=seconds, flops=1.0, bytes=1.0, limit=limit)

    made = StepProfile(
        seconds=1.0,
        tokens=1,
        rate=1.0,
        bandwidth=1.0,
        parts=(part("slow but near", 0.7, 0.68), part("far", 0.3, 0.1)),
        operators=(),
        trace=tmp_path / "trace.json",
    )
    assert made.next_gain().startswith("far: 200 ms of a step of 1000 ms")
    assert "33% of its limit" in made.next_gain()


def test_the_command_prints_the_tables(recipe, capsys, monkeypatch):
    made = recipe(name="demo")
    monkeypatch.setitem(RECIPES, "demo", made)
    main(["train", "demo", "--profile", "--json", "-", "--no-progress"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tokens"] == 4 * 32
    for text in ("head and loss", "operator", "next gain: ", "trace.json"):
        assert text in captured.err
