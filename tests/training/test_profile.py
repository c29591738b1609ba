"""`hasten profile train`: each part is charged with its own time, and no run is touched."""

import json

import pytest
import torch

from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.machine.limits import Limits
from hasten.profiling import meter as meters
from hasten.profiling import profile as profiles
from hasten.profiling import show
from hasten.profiling.meter import BACKWARD, FORWARD, Meter
from hasten.profiling.profile import profile
from hasten.profiling.steps import least_of, training
from hasten.profiling.tree import tree
from hasten.profiling.walk import COMPILED, parts_of
from hasten.training.recipes import RECIPES
from hasten.training.setup import set_up
from tiny_model import tiny_llama
from traces import check_trace


class Clock:
    """Time that passes only where a test says so."""

    now = 0

    def perf_counter_ns(self):
        return self.now


class Pass(torch.autograd.Function):
    """The identity; its forward pass takes `forward` seconds of a clock, its backward pass `backward`."""

    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward * 10**9
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds * 10**9
        return gradient, None, None, None


class Slow(torch.nn.Module):
    """In the place of a module, and so much slower."""

    def __init__(self, module, *seconds):
        super().__init__()
        self.module, self.seconds = module, seconds

    @property
    def weight(self):
        return self.module.weight

    def forward(self, x):
        return Pass.apply(self.module(x), *self.seconds)


@pytest.fixture(autouse=True)
def known_limits(monkeypatch):
    """Measuring the machine takes longer than all of these."""
    monkeypatch.setattr(profiles, "product_limits", lambda *_: Limits(1e10, {"float32": 1e11}))


def set_up_with(made, batches=2):
    setup = set_up(made, progress=False)
    return setup, [setup.batches.batch(position) for position in range(batches)]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_second_is_charged_to_the_part_it_is_spent_in(recipe, monkeypatch, checkpointing):
    setup, batches = set_up_with(recipe(layers=3, accumulation=2, checkpointing=checkpointing))
    model, clock = setup.model, Clock()
    monkeypatch.setattr(meters, "time", clock)
    model.dropout = Slow(model.dropout, clock, 1, 2)
    for block in model.blocks:
        block.attention_norm = Slow(block.attention_norm, clock, 10, 20)
        block.mlp = Slow(block.mlp, clock, 100, 200)
    model.norm = Slow(model.norm, clock, 1000, 3000)
    loss = model.loss
    model.loss = lambda x, targets: Pass.apply(loss(x, targets), clock, 10_000, 50_000)

    def slow_update(*_):
        clock.now += 100_000 * 10**9

    setup.step.optimizer.register_step_pre_hook(slow_update)
    work = training(setup, batches)
    with Meter(model, work.calls) as meter:
        meter.restart()
        clock.now += 7 * 10**9
        work.step()
        clock.now += 8 * 10**9
        spent = {part: seconds for part, seconds in meter.spent().items() if seconds}
    clock.now += 10**15
    marks = len(meter.marks)
    work.step()
    assert len(meter.marks) == marks, "nobody watches any more"
    again = checkpointing == "full"  # the forward pass a second time, as a part of the backward pass
    expected = {
        ("model.dropout", FORWARD): 2 * 1,
        ("model.dropout", BACKWARD): 2 * 2,
        ("model.norm", FORWARD): 2 * 1000,
        ("model.norm", BACKWARD): 2 * 3000,
        ("model.head", FORWARD): 2 * 10_000,
        ("model.head", BACKWARD): 2 * 50_000,
        ("update", FORWARD): 100_000,
        ("", FORWARD): 7 + 8,
    }
    for i in range(3):
        expected[f"model.blocks.{i}.attention_norm", FORWARD] = 2 * 10
        expected[f"model.blocks.{i}.attention_norm", BACKWARD] = 2 * (20 + 10 * again)
        expected[f"model.blocks.{i}.mlp", FORWARD] = 2 * 100
        expected[f"model.blocks.{i}.mlp", BACKWARD] = 2 * 200  # the last results of a block are not computed again
    assert spent == expected


def test_watching_changes_nothing(recipe):
    made = recipe(accumulation=2, precision="bfloat16")
    setup, batches = set_up_with(made)
    losses = [setup.step.run(batches).loss for _ in range(2)]
    setup, batches = set_up_with(made)
    with Meter(setup.model, training(setup, batches).calls):
        assert [setup.step.run(batches).loss for _ in range(2)] == losses
    names = {name for module in setup.model.modules() for name in vars(module)}
    assert not names & {"forward", "loss", "project"}
    assert not {"loss", "update"} & vars(setup.step).keys()


def test_a_profile_counts_each_product_and_parameter_once(recipe, tmp_path):
    made = recipe(precision="float32", attention="reference", accumulation=2)
    found = profile(made, tmp_path / "profile", steps=1)
    (step,) = found.phases
    whole, leaves = step.rows[0], [row for row in step.rows if row.leaf]
    assert sum(row.seconds for row in leaves) == pytest.approx(whole.seconds)
    assert (
        sum(row.parameters for row in leaves)
        == whole.parameters
        == step.checks["parameters: the parts' sum, the config's"][1]
    )
    # torch's counter also counts the keys that the causal mask hides.
    rows, tokens, layers = 4 * 2, 32, 2
    hidden = 3 * 4 * 32 * (tokens * tokens - tokens * (tokens + 1) // 2) * rows * layers
    shapes, counter = step.checks["FLOPs: from shapes, torch's FlopCounterMode"]
    assert shapes + hidden == counter
    by_name = {row.name: row for row in step.rows}
    assert all(by_name[name].seconds > 0 for name in ("model.embedding", "model.blocks.1.mlp", "model.head", "update"))
    assert by_name["model.blocks.0.mlp.down"].backward > 0
    assert step.tokens == rows * tokens
    assert 0 < step.traced.outside < step.traced.seconds
    assert max(held for _, held in step.traced.memory) > 0
    assert step.held >= 4 * whole.parameters
    trace = tmp_path / "profile" / "step.trace.json"
    check_trace(trace, "forward model.blocks.0.mlp.down", "backward model.blocks.0.mlp.down")
    assert '"aten::mm"' in trace.read_text()
    stored = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert stored["phases"][0]["rows"][0]["flops"] == whole.flops
    assert stored["kernels"]
    assert (tmp_path / "profile" / "profile.png").stat().st_size > 1000
    assert not (tmp_path / "runs" / "tiny" / "checkpoints").exists()


def test_the_tree_stops_at_compiled_blocks_and_says_so(recipe):
    setup, batches = set_up_with(recipe(attention="reference", layers=1), 1)
    for block in setup.model.blocks:
        block.compile(backend="eager")
    work = training(setup, batches)
    work.step()
    with Meter(setup.model, work.calls) as meter:
        meter.restart()
        work.step()
        found = tree(parts_of(setup.model), meter.spent(), least_of(work), rate=1e9, bandwidth=1e9)
    rows = {row.name: row for row in found}
    block = rows["model.blocks.0"]
    assert block.leaf
    assert block.note == COMPILED
    assert block.forward > 0
    assert block.backward > 0
    assert block.flops > 0
    assert block.parameters == sum(p.numel() for p in setup.model.blocks[0].parameters())
    torch._dynamo.reset()


def test_joined_products_stay_joined(recipe):
    """With hooks on them, q, k and v would be multiplied one by one."""
    setup, batches = set_up_with(recipe(joined_projections=True), 1)
    work = training(setup, batches)
    with Meter(setup.model, work.calls) as meter:
        meter.restart()
        work.step()
        spent = meter.spent()
    assert spent["model.blocks.0.attention.project", FORWARD] > 0
    assert ("model.blocks.0.attention.q", FORWARD) not in spent
    assert least_of(work)["model.blocks.0.attention.project"][0] == 3 * 2 * 128 * 32 * (32 + 16 + 16)


def test_the_command_prints_the_tables(recipe, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(show, "draw", lambda *_: None)
    monkeypatch.setitem(RECIPES, "demo", recipe(name="demo"))
    main(["profile", "train", "demo", "--measured", "1", "--sort", "gain", "--output", str(tmp_path / "found")])
    captured = capsys.readouterr()
    assert "attention, layers 0-1: " in captured.out
    for text in ("model.head", "operator", "next gain: ", "found: profile.json"):
        assert text in captured.err.replace("\n", "")


def test_torchruns_processes_are_refused_where_a_model_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a profile of serve is of one process: run it without torchrun"):
        profile(tiny_llama(), tmp_path / "found", use="serve")
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["profile", "play", "demo"], "train, generate or serve; found 'play'"),
        (["profile", "train", "demo", "--measured", "0"], "steps must be a whole number, at least 1; found 0"),
        (["profile", "train", "demo", "--output", "/dev/null/x"], "/dev/null/x cannot be written: Not a directory"),
        (["profile", "train", "demo", "--parallel.zero", "3"], "parallel.zero 3 is for several processes"),
        (["profile", "generate", "no/such/folder/at-all"], "at-all"),
    ],
)
def test_mistakes_are_one_line(words, error, capsys):
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1
