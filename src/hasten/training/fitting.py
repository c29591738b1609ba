"""Chooses the largest model that sees enough tokens in the given minutes on this machine.

A model that is too large for its minutes takes a few steps and learns nothing; a smaller one takes thousands. The loss
after a number of tokens is the same on every machine, so `Size.tokens` was measured once, and only the speed is
measured here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hasten.planning.cost import parameters
from hasten.training.recipe import Recipe
from hasten.training.recipes import Size
from hasten.training.setup import set_up

TRAINING_SHARE = 0.7  # share of the minutes for training; compiling and validation take the rest
MOST_SECONDS, MOST_STEPS = 5.0, 5  # limits of timing, after a first step that warms up


@dataclass(frozen=True, slots=True)
class Speed:
    """Training speed in tokens/s, and the model's number of parameters.

    bound: no step was taken; the speed is an upper bound.
    """

    tokens: float
    parameters: int
    bound: bool = False


def measured_speed(recipe: Recipe, *, needed: float = 0.0) -> Speed:
    """Measure the training speed by the fastest of a few steps, not compiled.

    If the machine's matrix rate alone rules out `needed` tokens/s, no step is taken (with emulated products one can
    take minutes), and the speed is that upper bound.
    """
    plain = replace(recipe, techniques=replace(recipe.techniques, compile=False))
    setup = set_up(plain, progress=True)
    size = parameters(setup.model.config).total
    bound = None if setup.rate is None else setup.rate / setup.flops_per_token
    if bound is not None and bound < needed:
        return Speed(bound, size, bound=True)
    batches = [setup.batches.batch(number) for number in range(recipe.data.accumulation)]
    times: list[float] = []
    while len(times) <= MOST_STEPS and (len(times) < 2 or sum(times) < MOST_SECONDS):
        started = time.perf_counter()
        result = setup.step.run(batches)
        assert result is not None
        result.loss.item()  # waits for the device
        times.append(time.perf_counter() - started)
    return Speed(sum(batch.inputs.numel() for batch in batches) / min(times[1:]), size)


def fit(
    recipe: Recipe, sizes: Sequence[Size], *, measure: Callable[..., Speed] = measured_speed
) -> tuple[Recipe, str | None]:
    """The recipe with the first of `sizes` (largest first) that sees enough tokens in `run.minutes`, else the closest.

    Also returns a line that says what was planned, what is trained and why, or None if it is the first size.
    """
    assert recipe.run.minutes is not None
    minutes = recipe.run.minutes
    seconds = minutes * 60 * TRAINING_SHARE
    speeds: list[Speed] = []
    shares: list[float] = []  # tokens that a size would see, over the tokens it needs
    for size in sizes:
        speeds.append(measure(size.of(recipe), needed=size.tokens / seconds))
        shares.append(speeds[-1].tokens * seconds / size.tokens)
        if shares[-1] >= 1:
            break
    measured = [index for index, speed in enumerate(speeds) if not speed.bound] or [len(sizes) - 1]
    best = max(measured, key=lambda index: shares[index])
    chosen, speed = sizes[best].of(recipe), speeds[best]
    few = "" if shares[best] >= 1 else f", where {sizes[best].tokens:,} are needed: expect little"
    if best == 0:
        return chosen, f"it will see about {speed.tokens * seconds:,.0f} tokens{few}" if few else None
    most = "at most " if speeds[0].bound else ""
    return chosen, (
        f"planned was a model of {_millions(speeds[0])} parameters, which learns from about {sizes[0].tokens:,} tokens "
        f"and would see {most}{speeds[0].tokens * seconds:,.0f} in {minutes:g} minutes here; trained is one of "
        f"{_millions(speed)}, which sees about {speed.tokens * seconds:,.0f}{few}"
    )


def _millions(speed: Speed) -> str:
    return f"{speed.parameters / 1e6:.1f} M"
