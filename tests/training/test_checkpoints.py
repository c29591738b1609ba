import errno
import json
import random
import re
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from full_disk import full_disk
from hasten.distributed.placement import Placement
from hasten.errors import CheckpointError, ResourceError
from hasten.measure.counted import Alive
from hasten.model.initialize import initialize
from hasten.training import checkpoints
from hasten.training.build import shape_config
from hasten.training.checkpoint_state import RandomState, TrainingState
from hasten.training.optimizers import adamw
from hasten.training.recipe import Optimizer, Recipe, Shape

CPU = torch.device("cpu")
CONFIG = shape_config(Shape(layers=1, hidden_size=16, heads=2, feed_forward=32), vocab_size=30, positions=8)


def trained(seed=0, steps=2):
    model = initialize(CONFIG, seed=seed)
    optimizer = adamw(model, Optimizer())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def save(folder, model, optimizer, step=2, **options):
    progress = TrainingState(step=step, tokens=100 * step).to_json()
    values = {"progress": progress, "data": "tokens", "scaler": {}, "recipe": Recipe(name="small").to_json()}
    random = RandomState.capture(CPU)
    where = Placement(model)
    return checkpoints.save(folder, placement=where, optimizer=optimizer, random=random, values=values, **options)


def assert_holds(folder, model, optimizer, step=2):
    stored = checkpoints.find(folder)
    assert stored is not None
    assert stored.step == step
    other, moments = trained(seed=9, steps=0)
    checkpoints.load(stored, placement=Placement(other), optimizer=moments, device=CPU)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))
        mine, theirs = optimizer.state[parameter], moments.state[other.get_parameter(name)]
        assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(("background", "shards"), [(False, 0.0), (True, 1.0)])
def test_a_checkpoint_takes_one_copy_in_the_background_and_else_none(tmp_path, monkeypatch, background, shards):
    """Counted are tensors; benchmarks/memory.py checkpoint measures resident memory, on two ranks."""

    class Here(threading.Thread):
        """Counting goes on in one thread only."""

        def start(self):
            self.run()

        def join(self):
            pass

    wide = Shape(layers=1, hidden_size=64, heads=2, feed_forward=128)  # beside which random states are small
    monkeypatch.setitem(globals(), "CONFIG", shape_config(wide, vocab_size=30, positions=8))
    model, optimizer = trained()
    monkeypatch.setattr(checkpoints.threading, "Thread", Here)
    held = [*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())]
    with Alive(held) as alive:
        before = sum(size for _, size in alive.found.values())
        pending = save(tmp_path, model, optimizer, background=background)
        if background:
            pending.finish()
    shard = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert (alive.peak - before) / shard == pytest.approx(shards, abs=0.1)


def test_everything_comes_back(tmp_path):
    model, optimizer = trained()
    save(tmp_path / "last", model, optimizer)
    drawn = (torch.rand(3), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert_holds(tmp_path / "last", model, optimizer)
    # `assert_holds` loaded the random states as well: the same numbers come next.
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]


def test_there_is_none_in_an_empty_folder(tmp_path):
    assert checkpoints.find(tmp_path) is None


def test_a_new_one_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    save(tmp_path, *trained())
    model, optimizer = trained(seed=1)
    save(tmp_path, model, optimizer, step=7)
    assert_holds(tmp_path, model, optimizer, step=7)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [re.sub("-[0-9a-f]+[.]", ".", name) for name in names] == [
        "checkpoint.json",
        "state-00000007.safetensors",
        "weights-00000007.safetensors",
    ]


@pytest.mark.parametrize("step", [2, 7])  # 2: the old one's own
def test_a_save_that_dies_half_way_leaves_the_old_one(tmp_path, monkeypatch, step):
    model, optimizer = trained()
    save(tmp_path, model, optimizer)

    def die(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save_json", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, *trained(seed=1), step=step)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("weights-*.safetensors"))) == 2
    assert_holds(tmp_path, model, optimizer)
    newer = trained(seed=2)
    save(tmp_path, *newer, step=8)
    assert_holds(tmp_path, *newer, step=8)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_the_old_one_stays(tmp_path, monkeypatch, number):
    model, optimizer = trained()
    save(tmp_path, model, optimizer)

    def full(descriptor):
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(ResourceError, match="disk is full"):
        save(tmp_path, *trained(seed=1), step=7)
    monkeypatch.undo()
    assert_holds(tmp_path, model, optimizer)
    assert not list(tmp_path.glob(".*"))


def test_a_real_limit_on_the_file_size_is_a_full_disk(tmp_path):
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    made = trained(seed=1)
    with full_disk(4096), pytest.raises(ResourceError, match="disk is full"):
        save(tmp_path, *made, step=7)
    assert_holds(tmp_path, model, optimizer)


def test_a_link_is_the_same_checkpoint_and_outlives_the_next_save(tmp_path):
    model, optimizer = trained()
    save(tmp_path / "last", model, optimizer)
    checkpoints.link(tmp_path / "last", tmp_path / "best")
    checkpoints.link(tmp_path / "last", tmp_path / "best")
    save(tmp_path / "last", *trained(seed=1), step=7)
    assert_holds(tmp_path / "best", model, optimizer)
    assert len(list((tmp_path / "best").iterdir())) == 3


@pytest.mark.parametrize("damage", ["truncated", "missing", "not json", "version", "no files", "other shape"])
def test_a_damaged_one_is_told(tmp_path, damage):
    save(tmp_path, *trained())
    index, (file,) = tmp_path / "checkpoint.json", tmp_path.glob("weights-*.safetensors")
    values = json.loads(index.read_text())
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "missing":
        file.unlink()
    elif damage == "not json":
        index.write_text("{")
    elif damage == "version":
        index.write_text(json.dumps(values | {"version": 99}))
    elif damage == "no files":
        index.write_text(json.dumps(values | {"files": None}))
    model, optimizer = trained()
    if damage == "other shape":
        model = initialize(CONFIG.padded_to(64), seed=0)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoints.load(checkpoints.find(tmp_path), placement=Placement(model), optimizer=optimizer, device=CPU)


def without(*path):
    """Takes a field away."""

    def change(values):
        *owners, name = path
        for owner in owners:
            values = values[owner]
        del values[name]

    return change


def with_(value, *path):
    """Puts a value in."""

    def change(values):
        *owners, name = path
        for owner in owners:
            values = values[owner]
        values[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("python_random"), "python_random is missing"),
        (with_([3, [1, 2], None], "python_random"), "python_random is no state"),
        (with_([3, [-1] * 625, None], "python_random"), "python_random is no state"),
        (without("scaler"), "scaler is missing"),
        (with_({"scale": "x"}, "scaler"), "scaler is {'scale': 'x'}"),
        (without("recipe"), "recipe is missing"),
        (with_("demo", "recipe"), "recipe is 'demo'"),
        (with_({"nome": "demo"}, "recipe"), "not a recipe of this version"),
        (with_("big", "recipe", "data"), "not a recipe of this version"),
        (without("data"), "data is missing"),
        (without("files", "weights"), "files.weights is missing"),
        (without("files", "state"), "files.state is missing"),
        (with_(3, "files", "state"), "files.state is 3"),
        (with_("all", "progress", "total"), "progress.total is 'all'"),
        (with_(-1, "progress", "step"), "progress.step is -1"),
        (with_([1], "progress", "bend"), r"progress.bend is \[1\]"),
        (with_(["x"], "progress", "recent_losses"), "progress.recent_losses is"),
        (with_({"step": 3}, "progress"), "progress.total is missing"),
        (with_(1, "progress", "more"), "progress.more is not known"),
    ],
)
def test_what_its_json_lacks_or_has_wrong_is_named(tmp_path, change, named):
    save(tmp_path, *trained())
    index = tmp_path / "checkpoint.json"
    values = json.loads(index.read_text())
    change(values)
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"{index} is damaged: .*{named}"):
        checkpoints.find(tmp_path)


@pytest.mark.parametrize("damage", ["no random state", "short random state", "moments of another shape"])
def test_damaged_states_are_told(tmp_path, damage):
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    (path,) = tmp_path.glob("state-*.safetensors")
    tensors = load_file(path)
    if damage == "moments of another shape":
        name = next(name for name in tensors if name.endswith("exp_avg"))
        tensors[name] = torch.zeros(3)
    elif damage == "no random state":
        del tensors["random.cpu"]
    else:
        tensors["random.cpu"] = tensors["random.cpu"][:10].clone()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoints.load(checkpoints.find(tmp_path), placement=Placement(model), optimizer=optimizer, device=CPU)
