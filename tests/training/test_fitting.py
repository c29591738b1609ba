"""Which model the demo trains: decided by speeds, here made up, and once by steps that are really taken."""

import pytest

from hasten.training import fitting
from hasten.training.fitting import TRAINING_SHARE, Speed, fit, measured_speed
from hasten.training.recipe import Recipe, Run, Shape
from hasten.training.recipes import DEMO_SIZES, RECIPES, Size

SIZES = (
    Size(model=Shape(layers=3), learning_rate=1e-3, tokens=900_000),
    Size(model=Shape(layers=2), optimizer="muon", learning_rate=2e-3, tokens=700_000),
    Size(model=Shape(layers=1), learning_rate=3e-3, tokens=500_000),
)
PLANNED = Recipe(name="demo", run=Run(minutes=4))


def measure(speeds):
    """The speed of each model, by its number of layers."""
    return lambda recipe, *, needed: Speed(speeds[recipe.model.layers], recipe.model.layers * 1_000_000)


def test_a_fast_machine_trains_what_was_planned_and_says_nothing():
    recipe, told = fit(PLANNED, SIZES, measure=measure({3: 900_000 / (240 * TRAINING_SHARE) + 1}))
    assert recipe == SIZES[0].of(PLANNED)
    assert told is None


def test_a_slower_one_trains_the_largest_that_learns_and_says_so_in_one_line():
    recipe, told = fit(PLANNED, SIZES, measure=measure({3: 100.0, 2: 5000.0, 1: 9000.0}))
    assert recipe == SIZES[1].of(PLANNED)
    assert (recipe.optimizer.kind, recipe.optimizer.learning_rate) == ("muon", 2e-3)
    assert "3.0 M" in told
    assert "2.0 M" in told
    assert f"{100 * 240 * TRAINING_SHARE:,.0f}" in told
    assert "\n" not in told


def test_one_too_slow_for_all_trains_what_comes_nearest_and_expects_little():
    recipe, told = fit(PLANNED, SIZES, measure=measure({3: 1.0, 2: 3.0, 1: 6.0}))
    assert recipe == SIZES[2].of(PLANNED)
    assert "expect little" in told
    recipe, told = fit(PLANNED, SIZES, measure=measure({3: 1000.0, 2: 3.0, 1: 6.0}))  # small products may be slower
    assert recipe == SIZES[0].of(PLANNED)
    assert "expect little" in told


def test_the_speed_is_that_of_steps_and_none_is_taken_where_the_matrix_rate_rules_it_out(recipe, monkeypatch):
    monkeypatch.setattr("hasten.training.setup.matrix_rate", lambda dtype, **options: 1e9)
    tiny = recipe()
    found = measured_speed(tiny)
    assert found.tokens > 0
    assert found.parameters > 0
    monkeypatch.setattr(fitting.time, "perf_counter", lambda: pytest.fail("a step was timed"))
    assert 0 < measured_speed(tiny, needed=1e12).tokens < 1e12


def test_the_sizes_of_the_demo_become_smaller_and_the_first_is_its_recipe():
    assert DEMO_SIZES[0].of(RECIPES["demo"]) == RECIPES["demo"]
    widths = [size.model.hidden_size for size in DEMO_SIZES]
    assert widths == sorted(widths, reverse=True)
    for size in DEMO_SIZES:
        size.of(RECIPES["demo"]).check()
