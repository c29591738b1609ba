"""Processes that measure in turns, round after round, so that all of them see the same states of a shared machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hasten.bench.process import Rung, RungRun


def run_interleaved(
    rungs: Sequence[Rung],
    *,
    rounds: int,
    timeout: float = 3600.0,
    warmup: int = 0,
    keep: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> list[RungRun]:
    """What came of each rung. The warm-up's rounds are not counted; one that fails is left out from there on.

    keep: all processes stay alive until the end; else each is started anew for each round. tell: called with a line
    about each step.
    """
    runs = [RungRun(rung, timeout) for rung in rungs]
    try:
        for run in runs if keep else ():
            tell(f"setting up: {run.rung.name}")
            run.start()
        for number in range(1 - warmup if keep else 1, rounds + 1):  # rounds 0, -1, … are the warm-up
            for run in runs:
                tell(f"{f'round {number} of {rounds}' if number > 0 else 'warm-up'}: {run.rung.name}")
                if not keep:
                    run.start()
                    for _ in range(warmup):
                        run.measure(counts=False)
                run.measure(counts=number > 0)
                if not keep:
                    run.end()
    except BaseException:
        for run in runs:
            run.end(at_once=True)
        raise
    for run in runs:
        run.end()
    return runs
