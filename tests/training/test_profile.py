"""`hasten train --profile`: each part is charged with its own time and FLOPs, and the run's folder is not touched."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hasten.cli.main import main
from hasten.ops.attention.train import flop_formulas
from hasten.planning.cost import training_flops_per_token
from hasten.training.build import shape_config
from hasten.training.meter import MeteredStep
from hasten.training.profile import PartTime, StepProfile, profile
from hasten.training.recipes import RECIPES
from hasten.training.setup import set_up


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Pass(torch.autograd.Function):
    """The identity; its forward pass takes `forward` seconds of a clock, its backward pass `backward`."""

    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds
        return gradient, None, None, None


class Slow(torch.nn.Module):
    """In the place of a module, and so much slower."""

    def __init__(self, module, *seconds):
        super().__init__()
        self.module, self.seconds = module, seconds

    def forward(self, x):
        return Pass.apply(self.module(x), *self.seconds)


def set_up_with(made, batches=2):
    setup = set_up(made, progress=False)
    return setup, [setup.batches.batch(position) for position in range(batches)]


def test_every_second_is_charged_to_the_part_it_is_spent_in(recipe):
    setup, batches = set_up_with(recipe(layers=3, accumulation=2))
    model, clock = setup.model, Clock()
    model.dropout = Slow(model.dropout, clock, 1, 2)
    for block in model.blocks:
        block.attention_norm = Slow(block.attention_norm, clock, 10, 20)
        block.mlp = Slow(block.mlp, clock, 100, 200)
    model.norm = Slow(model.norm, clock, 1000, 3000)
    loss = model.loss
    model.loss = lambda x, targets: Pass.apply(loss(x, targets), clock, 10_000, 50_000)

    def slow_update(*_):
        clock.now += 100_000

    setup.step.optimizer.register_step_pre_hook(slow_update)
    with MeteredStep(setup.step, clock) as step:
        clock.now += 7
        step.run(batches)
        clock.now += 8
    clock.now += 1e9
    setup.step.run(batches)  # its hooks are gone
    assert step.spent == {
        "embedding": 2 * (1 + 2),
        "blocks": 2 * 3 * (10 + 20 + 100 + 200),
        "norm": 2 * (1000 + 3000),
        "head and loss": 2 * (10_000 + 50_000),
        "update": 100_000,
        "between": 7 + 8,
    }


@pytest.mark.parametrize("separate", [False, True])
def test_metering_changes_nothing_and_leaves_no_product_out(recipe, separate):
    made = recipe(accumulation=2, separate_documents=separate, precision="bfloat16")
    whole, parts = (FlopCounterMode(display=False, custom_mapping=flop_formulas()) for _ in range(2))
    setup, batches = set_up_with(made)
    with whole:
        losses = [setup.step.run(batches).loss for _ in range(2)]
    setup, batches = set_up_with(made)
    with MeteredStep(setup.step, lambda: float(parts.get_total_flops())) as step, parts:
        assert [step.run(batches).loss for _ in range(2)] == losses
    assert step.spent["update"] == step.spent["between"] == step.spent["norm"] == 0
    assert sum(step.spent.values()) == whole.get_total_flops()


def test_parts_operators_and_flops_of_a_step(recipe, tmp_path):
    made = recipe(precision="float32", attention="reference", accumulation=2)
    found = profile(made, tmp_path / "profile", progress=False)
    names = [part.name for part in found.parts]
    assert names == ["embedding", "blocks", "norm", "head and loss", "update", "between"]
    parts = dict(zip(names, found.parts, strict=True))
    assert all(part.seconds > 0 for part in found.parts)
    assert found.tokens == 2 * 4 * 32
    config = shape_config(made.model, vocab_size=300, positions=32)
    whole = training_flops_per_token(config, 32) * found.tokens
    # The counter counts what is hidden by the causal mask too, and neither norms nor the embedding.
    counted = sum(part.flops for part in found.parts)
    assert 0.9 * whole < counted < 1.5 * whole
    assert parts["blocks"].flops > parts["head and loss"].flops > 0
    assert parts["norm"].flops == parts["update"].flops == parts["between"].flops == 0
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
