"""Decides the number of steps of a run: by steps, epochs, or minutes and the speed of its first steps."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from hasten.training.recipe import Recipe
from hasten.training.recipe_checks import CALIBRATION_STEPS

WARMING_STEPS = 2  # the first steps compile and fill caches: their time says nothing about later ones
FORWARD_SHARE = 1 / 3  # time of a forward pass, as a share of a training step on the same tokens
# All of the following are shares of run.minutes.
CALIBRATED_AT_LATEST = 0.3  # when calibration ends, even with fewer steps than it should have
TOLERATED = 1.1  # expected end above which the total is lowered
LATEST = 1.15  # the end in any case
LAST_STEPS = 0.05  # time kept for the last steps, so that the learning rate still decays
BETWEEN_CHECKS = 0.05  # time between two checks of the clock (each lowering writes a checkpoint)
WINDOW = 0.2  # steps whose median speed counts, so that a machine busy for a moment does not shorten the run


def fixed_steps(recipe: Recipe, *, windows: int) -> int | None:
    """Steps that `run.steps` and `run.epochs` allow; None if only minutes are given. windows: rows of an epoch."""
    limits = []
    if recipe.run.steps is not None:
        limits.append(recipe.run.steps)
    if recipe.run.epochs is not None:
        rows = recipe.data.batch_size * recipe.data.accumulation
        limits.append(max(1, math.ceil(recipe.run.epochs * windows / rows)))
    return min(limits, default=None)


def timed_steps(recipe: Recipe, *, step_seconds: Sequence[float], used: float, validation_batches: int) -> int:
    """Steps that fit into `run.minutes`, at least those already taken.

    step_seconds: of the steps taken. used: seconds used so far. A validation is expected to take a third of a training
    step's time on the same tokens.
    """
    assert recipe.run.minutes is not None
    each = median(step_seconds[WARMING_STEPS:] or step_seconds)
    validation = _validation_seconds(recipe, each, validation_batches)
    left = recipe.run.minutes * 60 - used - validation  # the last validation follows the last step
    more = max(0, int(left / (each + validation / recipe.run.validate_every)))
    return len(step_seconds) + more


def calibrated(recipe: Recipe, *, steps: int, used: float) -> bool:
    """Whether enough steps were timed, or too much of `run.minutes` was used to time more."""
    assert recipe.run.minutes is not None
    share = used / (recipe.run.minutes * 60)
    return steps >= CALIBRATION_STEPS or share >= 1 or (share >= CALIBRATED_AT_LATEST and steps > WARMING_STEPS)


class Pace:
    """Watches the speed of a run with `run.minutes` and decides when to lower its total number of steps.

    Its own state is not part of a checkpoint; the totals that it decides are. used: seconds of the run so far.
    """

    def __init__(self, recipe: Recipe, *, used: float, validation_batches: int) -> None:
        assert recipe.run.minutes is not None
        self.recipe = recipe
        self.allowed = recipe.run.minutes * 60
        self.validation_batches = validation_batches
        self._recent: deque[tuple[float, float]] = deque()  # (seconds of the run, of the step)
        self._next_check = used + BETWEEN_CHECKS * self.allowed

    def lowered(self, *, step: int, total: int, elapsed: float, used: float) -> int:
        """The total number of steps: `total`, or fewer, but at least `step`, if the run would end too late.

        step: steps taken, the last of which took `elapsed` seconds. used: seconds of the run so far.
        """
        self._recent.append((used, elapsed))
        while self._recent[0][0] < used - WINDOW * self.allowed and len(self._recent) > WARMING_STEPS + 1:
            self._recent.popleft()
        if used >= LATEST * self.allowed:
            return step
        if used < self._next_check:
            return total
        self._next_check = used + BETWEEN_CHECKS * self.allowed
        each = median(seconds for _, seconds in self._recent)
        validation = _validation_seconds(self.recipe, each, self.validation_batches)
        by_step = each + validation / self.recipe.run.validate_every
        if used + (total - step) * by_step + validation <= TOLERATED * self.allowed:
            return total
        left = max(self.allowed - used - validation, LAST_STEPS * self.allowed)
        return min(total, step + int(left / by_step))


def _validation_seconds(recipe: Recipe, each: float, batches: int) -> float:
    """Seconds of one measurement of the validation loss, if a step takes `each` seconds."""
    return FORWARD_SHARE * each * batches / recipe.data.accumulation
