import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hasten.errors import ConfigError
from hasten.training.recipe import FREE_FIELDS, Recipe, differences, flat
from hasten.training.recipes import DESCRIPTIONS, RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json_and_can_work(name):
    recipe = RECIPES[name]
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    recipe.check()
    assert recipe.name == name
    assert name in DESCRIPTIONS


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("data", {"batch_size": 0}, "data.batch_size"),
        ("data", {"validation_fraction": 1.0}, "data.validation_fraction"),
        ("optimizer", {"learning_rate": float("nan")}, "optimizer.learning_rate"),
        ("optimizer", {"clip": -1.0}, "optimizer.clip"),
        ("optimizer", {"beta2": 1.0}, "optimizer.beta2"),
        ("schedule", {"final_fraction": 2.0}, "schedule.final_fraction"),
        ("schedule", {"warmup_steps": -1}, "schedule.warmup_steps"),
        ("schedule", {"warmup_steps": 2}, "run.minutes"),
        ("run", {"minutes": None}, "run.steps"),
        (None, {"name": "../elsewhere"}, "name"),
        (None, {"dropout": 1.0}, "dropout"),
    ],
)
def test_a_value_that_cannot_work_is_named(section, change, named):
    demo = RECIPES["demo"]
    wrong = replace(demo, **(change if section is None else {section: replace(getattr(demo, section), **change)}))
    with pytest.raises(ConfigError, match=named):
        wrong.check()


def test_differences_name_the_field_and_leave_out_what_changes_nothing():
    demo = RECIPES["demo"]
    changed = replace(demo, optimizer=replace(demo.optimizer, beta2=0.9), run=replace(demo.run, checkpoint_every=7))
    assert differences(demo, changed) == ["optimizer.beta2: 0.95 -> 0.9"]
    assert differences(demo, demo) == []


def test_free_fields_exist():
    assert flat(RECIPES["demo"]).keys() >= FREE_FIELDS


def test_a_recipe_of_an_earlier_version_is_read():
    demo = RECIPES["demo"]
    assert Recipe.from_json(demo.to_json() | {"diloco": {"sync_every": None, "momentum": 0.9}}) == demo
    for earlier in ({"sync_every": 30}, 3):
        with pytest.raises(ConfigError, match="not a recipe of this version"):
            Recipe.from_json(demo.to_json() | {"diloco": earlier})


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match="colour"):
        Recipe.from_json({"name": "x", "colour": "red"})


def test_recipes_do_not_import_torch():
    code = "import sys, hasten.training, hasten.training.recipes, hasten.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
