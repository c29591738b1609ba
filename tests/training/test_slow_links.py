"""Recipes for slow links: 1-bit Adam and LAMB, trained by two processes, stopped and continued."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import ranks
from hasten.errors import ConfigError
from hasten.training.journal import read
from hasten.training.session import train

pytestmark = pytest.mark.slow  # trains five runs, which its tests share

ONEBIT = {"steps": 24, "beta2": 0.999, "freeze_after": 9, "validate_every": 12, "validation_batches": 1}
WAYS = {
    "onebit-adam": {"kind": "onebit-adam", **ONEBIT},
    "onebit-lamb": {"kind": "onebit-lamb", "learning_rate": 0.05, **ONEBIT},
    "onebit-masters": {"kind": "onebit-adam", "precision": "bfloat16", "policy": "float32-masters", **ONEBIT},
}
STOPPED = {"onebit-adam": 14, "onebit-lamb": 5}  # after so many steps


@pytest.fixture(scope="module")
def runs(recipe_of_module):
    """All trained whole, and some stopped and gone on with."""
    folder = Path(recipe_of_module().run.folder)
    whole = [recipe_of_module(name=name, **fields).to_json() for name, fields in WAYS.items()]
    again = [recipe_of_module(name=f"{name}-again", **WAYS[name]).to_json() for name in STOPPED]
    stops = [case | {"stop_after": STOPPED[case["name"].removesuffix("-again")]} for case in again]
    ranks.train_all([*whole, *stops], folder.parent)
    shutil.copytree(folder, folder.parent / "stopped")
    ranks.train_all(again, folder.parent)
    return folder


def losses(runs, name):
    return [(line["step"], line["loss"], line.get("validation_loss")) for line in read(runs / name / "train.jsonl")]


@pytest.mark.parametrize("name", WAYS)
def test_they_learn(runs, recipe_of_module, name):
    plain = {key: value for key, value in WAYS[name].items() if key not in ("kind", "freeze_after")}
    kind = "lamb" if name == "onebit-lamb" else "adamw"
    one = train(recipe_of_module(name=f"plain-{name}", kind=kind, **plain), progress=False)
    found = losses(runs, name)
    wanted = losses(runs, one.folder.name)
    assert found[-1][2] < found[0][1] - 0.5
    assert found[-1][2] < 1.1 * wanted[-1][2]
    # The warm-up is that of one process.
    allowed = 5e-3 if name == "onebit-masters" else 1e-4  # gradients are summed in another order, in 16 bits
    for ours, theirs in zip(found[:9], wanted[:9], strict=True):
        assert ours[1] == pytest.approx(theirs[1], abs=allowed)
    assert found[-1][1] != wanted[-1][1]


@pytest.mark.parametrize("name", STOPPED)
def test_they_go_on_bit_for_bit(runs, name):
    assert losses(runs, f"{name}-again") == losses(runs, name)
    one, other = (runs / run / "model/model.safetensors" for run in (name, f"{name}-again"))
    assert one.read_bytes() == other.read_bytes()


def test_checkpoints_hold_the_errors_of_each_rank(runs):
    """4 bytes a parameter of its own mean, 4/N of its piece of everybody's: as the planner counts them."""
    count = sum(weight.numel() for weight in load_file(runs / "onebit-adam/model/model.safetensors").values())
    for rank, own in enumerate(("random", "random.1")):
        (file,) = (runs / "onebit-adam/checkpoints/last").glob(f"state-*-{rank}.safetensors")
        state = load_file(file)
        held = sum(state[f"{own}.{name}"].nbytes for name in ("worker_error", "server_error"))
        assert held == pytest.approx((4 + 4 / 2) * count, rel=0.05)  # rows that pad the vocabulary, and pieces


@pytest.mark.parametrize("name", STOPPED)
def test_one_process_goes_on_with_what_two_have_left(runs, recipe_of_module, name, monkeypatch):
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(variable, value)
    made = recipe_of_module(name=f"{name}-again", folder=str(runs.parent / "stopped"), **WAYS[name])
    try:
        train(made, progress=False, resume="must")
    finally:
        dist.destroy_process_group()
    found, wanted = losses(runs.parent / "stopped", made.name), losses(runs, name)
    assert found[: STOPPED[name]] == wanted[: STOPPED[name]]
    assert [step for step, *_ in found] == [step for step, *_ in wanted]
    assert found[-1][2] < 1.1 * wanted[-1][2]


def test_what_does_not_fit_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"beta2 is 0\.95; one-bit optimizers"):
        recipe(kind="onebit-adam").check()
    with pytest.raises(ConfigError, match=r"onebit-lamb is for several processes"):
        train(recipe(kind="onebit-lamb", beta2=0.999), progress=False)
