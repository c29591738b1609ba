"""How many steps a run takes: from steps, epochs, or the speed of its first steps and the minutes it may last."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from hasten.training.recipe import Recipe
from hasten.training.recipe_checks import CALIBRATION_STEPS

# The very first steps compile and fill caches; their time is spent, and says nothing about the ones to come.
WARMING_STEPS = 2
# A forward pass alone, as a share of a training step on the same tokens.
FORWARD_SHARE = 1 / 3
# All of the following are shares of run.minutes. Where steps are so long that calibrating would use it up;
CALIBRATED_AT_LATEST = 0.3
# how far over it the end may be expected before the total is lowered;
TOLERATED = 1.1
# the end, whatever else; what is kept for the last steps, so that the rate still comes down;
LATEST = 1.15
LAST_STEPS = 0.05
# the time from one look at the clock to the next (each lowering writes a checkpoint); the steps whose speed counts:
# their median, so that a machine that is busy for a moment does not shorten the run.
BETWEEN_CHECKS = 0.05
WINDOW = 0.2


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
    validation = _validation_seconds(recipe, each, validation_batches)
    left = recipe.run.minutes * 60 - used - validation  # the last validation comes after the last step
    more = max(0, int(left / (each + validation / recipe.run.validate_every)))
    return len(step_seconds) + more


def calibrated(recipe: Recipe, *, steps: int, used: float) -> bool:
    """Whether enough steps were timed, or so much of `run.minutes` is gone that fewer must do."""
    assert recipe.run.minutes is not None
    share = used / (recipe.run.minutes * 60)
    return steps >= CALIBRATION_STEPS or share >= 1 or (share >= CALIBRATED_AT_LATEST and steps > WARMING_STEPS)


class Pace:
    """Looks at the clock of a run with `run.minutes`, whose total is known, and says when it has to be lowered.

    What it remembers is not part of a checkpoint: each decision is, as the total it leads to.
    """

    def __init__(self, recipe: Recipe, *, used: float, validation_batches: int) -> None:
        """used: seconds of the run up to now."""
        assert recipe.run.minutes is not None
        self.recipe = recipe
        self.allowed = recipe.run.minutes * 60
        self.validation_batches = validation_batches
        self._recent: deque[tuple[float, float]] = deque()  # (seconds of the run, of the step)
        self._next_check = used + BETWEEN_CHECKS * self.allowed

    def lowered(self, *, step: int, total: int, elapsed: float, used: float) -> int:
        """The total after step number `step`, which took `elapsed` seconds: `total`, or fewer if it would be too late.

        used: seconds of the run up to now. At least `step`.
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
    """What one measurement of the validation loss takes, where a step takes `each` seconds."""
    return FORWARD_SHARE * each * batches / recipe.data.accumulation
