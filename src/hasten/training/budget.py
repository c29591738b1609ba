"""How many steps a run takes: from steps, epochs, or the speed of its first steps and the minutes it may last."""

import math
from collections.abc import Sequence
from statistics import median

from hasten.training.recipe import CALIBRATION_STEPS, Recipe

# The very first steps compile and fill caches; their time is spent, and says nothing about the ones to come.
WARMING_STEPS = 2
# A forward pass alone, as a share of a training step on the same tokens.
FORWARD_SHARE = 1 / 3


def fixed_steps(recipe: Recipe, *, windows: int) -> int | None:
    """The steps that `run.steps` and `run.epochs` allow; None where only minutes are given. windows: of an epoch."""
    limits = []
    if recipe.run.steps is not None:
        limits.append(recipe.run.steps)
    if recipe.run.epochs is not None:
        rows = recipe.data.batch_size * recipe.data.accumulation
        limits.append(max(1, math.ceil(recipe.run.epochs * windows / rows)))
    return min(limits, default=None)


def timed_steps(recipe: Recipe, *, step_seconds: Sequence[float], used: float, validation_batches: int) -> int:
    """The steps that fit into `run.minutes`, given the seconds of the first ones and all the seconds used so far.

    Each validation is reckoned at its share of a step's time. At least the steps already taken.
    """
    assert recipe.run.minutes is not None
    each = median(step_seconds[WARMING_STEPS:] or step_seconds)
    validation = FORWARD_SHARE * each * validation_batches / recipe.data.accumulation
    left = recipe.run.minutes * 60 - used - validation  # the last validation comes after the last step
    more = max(0, int(left / (each + validation / recipe.run.validate_every)))
    return len(step_seconds) + more


def calibrated(steps: int) -> bool:
    """Whether enough steps were timed."""
    return steps >= CALIBRATION_STEPS
