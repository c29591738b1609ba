"""`hasten train --devices auto`: a plan for this machine chooses what is not given, and the run is one that fits."""

from dataclasses import replace

import pytest
import torch

from hasten.bench import plan as plans
from hasten.bench import training_choices
from hasten.bench.training_choices import choose_for_recipe
from hasten.cli.main import main
from hasten.errors import ConfigError, ResourceError
from hasten.machine.limits import Limits
from hasten.planning.devices import DEVICES
from hasten.planning.memory import PROCESS_BYTES
from hasten.training import session
from hasten.training.build import shape_config
from hasten.training.memory import MemoryCheck
from hasten.training.recipe import Qat
from hasten.training.recipes import RECIPES
from hasten.training.session import train


class Begun(Exception):
    """A run would begin."""


@pytest.fixture
def memory(monkeypatch):
    """`memory(10)`: this machine has 10 MB for tensors."""
    monkeypatch.setattr(plans, "product_limits", lambda *given, **options: Limits(2e10, {"float32": 2e11}))

    def leave(megabytes):
        monkeypatch.setattr(plans, "available_memory", lambda kind: PROCESS_BYTES + int(megabytes * 1e6))

    leave(8000)
    return leave


@pytest.fixture
def h100s(monkeypatch):
    """This machine has eight H100s."""
    device = replace(DEVICES["h100"], measured=True)
    monkeypatch.setattr(plans, "_device", lambda options, weights: (device, "bfloat16"))
    monkeypatch.setattr(training_choices, "_devices_here", lambda subject: 8)


@pytest.fixture
def begun(monkeypatch):
    """The recipes of runs that would begin."""
    found = []

    def begin(recipe, **options):
        found.append(recipe)
        raise Begun

    monkeypatch.setattr(session, "train", begin)
    return found


@pytest.mark.parametrize("changes", [{}, {"qat": Qat(bits=4)}, {"optimizer": replace(RECIPES["demo"].optimizer)}])
def test_what_is_chosen_fits_into_the_memory_that_it_is_chosen_for(recipe, memory, changes):
    made = recipe(layers=4, batch_size=32, context=64, **changes)
    config = shape_config(made.model, vocab_size=made.data.vocab_size, positions=64)
    whole = MemoryCheck(config=config, recipe=made, device=torch.device("cpu")).memory().peak
    seen = set()
    for share in (1.1, 0.7, 0.4):
        memory(share * whole / 1e6)
        way = choose_for_recipe(made).best
        seen.add(way.options)
        data = replace(made.data, batch_size=way.use.batch_size, accumulation=way.use.accumulation)
        assert data.batch_size * data.accumulation == 32
        kept = replace(made.techniques, checkpointing=way.use.recompute)
        found = MemoryCheck(config=config, recipe=replace(made, data=data, techniques=kept), device=torch.device("cpu"))
        assert found.memory().peak <= share * whole
    assert len(seen) == 3
    memory(0.01)
    with pytest.raises(ResourceError, match=r"take a smaller model \(--model.layers\), or a shorter --data.context"):
        choose_for_recipe(made)
    with pytest.raises(ResourceError, match=r"give fewer --data\.batch-size and more --data\.accumulation, or take a"):
        choose_for_recipe(made, kept={"data.batch_size"})


def test_the_command_adds_what_the_plan_chooses_and_says_it_in_a_line(recipe, memory, begun, monkeypatch, capsys):
    made = recipe(name="demo", batch_size=32, context=64, layers=4)
    monkeypatch.setitem(RECIPES, "demo", made)
    config = shape_config(made.model, vocab_size=made.data.vocab_size, positions=64)
    whole = MemoryCheck(config=config, recipe=made, device=torch.device("cpu")).memory().peak
    memory(0.6 * whole / 1e6)
    with pytest.raises(Begun):
        main(["train", "demo", "--devices", "auto"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("this machine (cpu): --data.accumulation ")
    assert "predicted: 0.0 of 0.0 GB, " in line
    (asked,) = begun
    assert asked.data.batch_size * asked.data.accumulation == 32
    assert asked.data.accumulation > 1
    with pytest.raises(Begun):  # what is given stays
        main(["train", "demo", "--devices=auto", "--data.batch-size", "32"])
    assert (begun[1].data.batch_size, begun[1].data.accumulation) == (32, 1)
    assert begun[1].techniques.checkpointing != "none"
    memory(8000)
    with pytest.raises(Begun):
        main(["train", "demo", "--devices", "auto"])
    assert begun[2] == made
    assert "this machine (cpu): no option to add; predicted: " in capsys.readouterr().err


def test_several_gpus_are_used_and_what_is_given_is_kept(recipe, h100s):
    large = replace(recipe(batch_size=64, accumulation=2, context=1024), model=RECIPES["gpt2-124m"].model)
    large = replace(large, techniques=replace(large.techniques, precision="auto"))
    way = choose_for_recipe(large).best
    assert way.devices == 8
    assert way.changes[0] == "--processes 8"
    assert "--data.batch-size 64" in way.kept, "of all ranks together"
    masters = [change for change in way.changes if "float32-masters" in change]
    assert all(change.endswith(" --techniques.precision bfloat16") for change in masters), "or it would be refused"
    kept = choose_for_recipe(large, kept={"parallel.policy", "parallel.zero"}, processes=4)
    assert {(way.devices, way.use.zero, way.use.masters) for way in kept.rows} == {(4, 0, False)}
    odd = replace(large, data=replace(large.data, batch_size=12))
    assert choose_for_recipe(odd).best.devices == 6, "12 rows"
    with pytest.raises(ConfigError, match="12, which 8 processes cannot share evenly"):
        choose_for_recipe(odd, processes=8)


def test_a_run_goes_on_with_what_it_began_with(recipe, memory, begun, monkeypatch, capsys):
    made = recipe(name="demo", batch_size=8, steps=4)
    train(replace(made, data=replace(made.data, batch_size=2, accumulation=4)), progress=False)
    monkeypatch.setitem(RECIPES, "demo", made)
    with pytest.raises(Begun):
        main(["train", "demo", "--devices", "auto"])
    assert (begun[0].data.batch_size, begun[0].data.accumulation) == (2, 4)
    with pytest.raises(Begun):
        main(["train", "demo", "--devices", "auto", "--resume", "never"])
    assert (begun[1].data.batch_size, begun[1].data.accumulation) == (8, 1)


def test_what_cannot_be_planned_says_what_to_do(recipe, monkeypatch, memory, capsys):
    with pytest.raises(ConfigError, match="leave out --devices auto, or --teacher"):
        choose_for_recipe(replace(recipe(), teacher="MODEL"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["train", "demo", "--devices", "auto"])
    assert "--devices auto starts the processes itself: run the command without torchrun" in capsys.readouterr().err
