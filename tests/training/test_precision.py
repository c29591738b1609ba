"""`precision: auto`: what the machine multiplies at speed, decided once and kept by the run."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.machine import measured
from hasten.training import Precision, train
from hasten.training.build import training_step
from hasten.training.precision import choose_precision
from hasten.training.recipe import Parallel, Recipe, differences
from tiny_model import tiny_llama


def test_auto_is_the_default_and_follows_the_processor(processor):
    recipe = Recipe(name="x")
    assert recipe.techniques.precision == "auto"
    processor("avx512_bf16")
    assert choose_precision(recipe)[0].techniques.precision == Precision("auto", "cpu").name == "bfloat16"
    processor("avx2")
    chosen, why = choose_precision(recipe)
    assert chosen.techniques.precision == Precision("auto", "cpu").name == "float32"
    assert str(why) == "float32: bfloat16 is emulated by this processor"
    assert choose_precision(chosen)[1].reason == "as the recipe says"
    assert differences(chosen, recipe) == []


def test_the_first_rank_decides_for_all(processor):
    class Second(Ranks):
        def texts(self, own):
            return ["float32\nslower there", own]

    processor("avx512_bf16")
    chosen, why = choose_precision(Recipe(name="x"), ranks=Second(rank=1, size=2))
    assert chosen.techniques.precision == why.dtype == "float32"
    assert why.reason == "slower there"


def test_a_run_keeps_the_precision_it_began_with(recipe, processor, capsys):
    processor("avx2")
    whole = train(recipe(precision="auto", steps=2, name="whole"), progress=False)
    assert whole.to_json()["precision"] == {
        "dtype": "float32",
        "reason": "bfloat16 is emulated by this processor",
    }

    class Stop(Exception):
        pass

    def stop(line):
        raise Stop

    with pytest.raises(Stop):
        train(recipe(precision="auto", steps=2, checkpoint_every=1), progress=False, on_step=stop)
    processor("avx512_bf16")  # another machine, or another measurement
    measured._store.cache_clear()
    resumed = train(recipe(precision="auto", steps=2, checkpoint_every=2), progress=True)
    assert resumed.precision == {"dtype": "float32", "reason": "as the run began"}
    assert "matrix products in float32: as the run began" in capsys.readouterr().err
    assert resumed.loss == whole.loss
    stored = json.loads((resumed.folder / "checkpoints" / "last" / "checkpoint.json").read_text())
    assert stored["recipe"]["techniques"]["precision"] == "float32"
    assert isinstance(stored["measured"], dict)
    with pytest.raises(ConfigError, match=r"techniques.precision: float32 -> bfloat16"):
        train(recipe(precision="bfloat16", steps=2), progress=False)


class Casts(TorchDispatchMode):
    """Counts the copies of one shape in another dtype."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func == torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keeps_casts", "casts"), [(True, 1), (False, 2)])
def test_a_weight_is_cast_once_a_step_or_wherever_it_is_used(keeps_casts, casts):
    weight, x = torch.nn.Parameter(torch.randn(64, 32)), torch.randn(1, 32)
    with Casts(weight.shape) as counted, Precision("bfloat16", "cpu", keeps_casts=keeps_casts).autocast():
        for _ in range(2):
            torch.nn.functional.linear(x, weight)
    assert counted.found == casts


@pytest.mark.parametrize(("zero", "checkpointing", "kept"), [(3, "full", False), (3, "none", True), (2, "full", True)])
def test_where_no_rank_is_to_have_all_weights_their_casts_go_too(recipe, zero, checkpointing, kept):
    made = replace(recipe(precision="bfloat16", checkpointing=checkpointing), parallel=Parallel(zero=zero))
    step = training_step(tiny_llama(), made, ranks=Ranks())  # one process, which divides nothing
    assert step.precision.keeps_casts == kept
