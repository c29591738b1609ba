"""The learning rate as a plain function of the step, without state, so that a resumed run needs none."""

import math

from hasten.training.recipe import Schedule

# (step, factor) where the total was lowered; from there the rate decays without a jump.
DecayStart = tuple[int, float]


def learning_rate(
    schedule: Schedule, *, peak: float, step: int, total: int | None, decay_start: DecayStart | None = None
) -> float:
    """The learning rate of step number `step` (from 0) of `total`; total: None while it is unknown, in the warm-up."""
    return peak * factor(schedule, step=step, total=total, decay_start=decay_start)


def factor(schedule: Schedule, *, step: int, total: int | None, decay_start: DecayStart | None = None) -> float:
    """The learning rate as a share of its peak: rises to 1 in the warm-up, ends at final_fraction in the last step.

    decay_start: where the total was last lowered, after the warm-up. This shortens the stable phase of wsd; a decay or
    cosine that should already have begun begins there.
    """
    warmup = warmup_steps(schedule, total)
    if step < warmup:
        return (step + 1) / warmup
    if total is None or schedule.kind == "constant":
        return 1.0
    last, final = total - 1, schedule.final_fraction
    start, top = (warmup, 1.0) if decay_start is None else decay_start
    if schedule.kind == "wsd":
        if top == 1.0:
            start = max(start, total - decay_steps(schedule, total))
        return decaying(step, start=start, last=last, top=top, final=final)
    return cosine(step, start=start, last=last, top=top, final=final)


def warmup_steps(schedule: Schedule, total: int | None) -> int:
    """Steps of the warm-up: at most the schedule's share of all steps, rounded up."""
    if total is None or schedule.warmup_share == 1:
        return schedule.warmup_steps
    return min(schedule.warmup_steps, math.ceil(schedule.warmup_share * total))


def cosine(step: int, *, start: int, last: int, final: float, top: float) -> float:
    """Half a cosine from `top` at `start` to `final` at `last` (arXiv 1608.03983, without restarts)."""
    return final + (top - final) * 0.5 * (1 + math.cos(math.pi * _progress(step, start=start, last=last)))


def decaying(step: int, *, start: int, last: int, final: float, top: float) -> float:
    """`top` up to `start`, then a linear decay to `final` at `last` (arXiv 2404.06395)."""
    return top - (top - final) * _progress(step, start=start, last=last)


def decay_steps(schedule: Schedule, total: int) -> int:
    """Number of steps at the end in which wsd decays."""
    return math.ceil(schedule.decay_fraction * total)


def _progress(step: int, *, start: int, last: int) -> float:
    if step >= last:
        return 1.0
    return max(0.0, (step - start) / (last - start)) if last > start else 0.0
