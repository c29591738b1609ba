"""The learning rate as a plain function of the step: no state, so a resumed run needs none."""

import math

from hasten.training.recipe import Schedule


def learning_rate(schedule: Schedule, *, peak: float, step: int, total: int | None) -> float:
    """The rate of step number `step` (from 0) of `total`; None while the total is not known yet, in the warm-up."""
    return peak * factor(schedule, step=step, total=total)


def factor(schedule: Schedule, *, step: int, total: int | None) -> float:
    """The share of the peak, in [0, 1]: rises to 1 in the warm-up, ends at final_fraction in the last step."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if total is None or schedule.kind == "constant":
        return 1.0
    last = total - 1
    if schedule.kind == "wsd":
        return decaying(
            step, start=max(schedule.warmup_steps, total - decay_steps(schedule, total)), last=last, schedule=schedule
        )
    return cosine(step, start=schedule.warmup_steps, last=last, final=schedule.final_fraction)


def cosine(step: int, *, start: int, last: int, final: float) -> float:
    """Half a cosine from 1 at `start` to `final` at `last` (arXiv 1608.03983, without restarts)."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * _progress(step, start=start, last=last)))


def decaying(step: int, *, start: int, last: int, schedule: Schedule) -> float:
    """1 up to `start`, then a straight line to the final fraction at `last` (arXiv 2404.06395)."""
    return 1 - (1 - schedule.final_fraction) * _progress(step, start=start, last=last)


def decay_steps(schedule: Schedule, total: int) -> int:
    """How many of the steps at the end wsd decays in."""
    return math.ceil(schedule.decay_fraction * total)


def _progress(step: int, *, start: int, last: int) -> float:
    if step >= last:
        return 1.0
    return max(0.0, (step - start) / (last - start)) if last > start else 0.0
