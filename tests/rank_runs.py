"""Runs of one process and of several, compared."""

import math
import os
import signal

from hasten.training.recipe import flat
from hasten.training.recipes import RECIPES
from hasten.training.session import train


def stop_after(made, step):
    train(made, progress=False, on_step=lambda line: line["step"] == step and os.kill(os.getpid(), signal.SIGTERM))


def assert_same(ours, theirs, tolerance=1e-5, keys=("loss", "gradient_norm", "validation_loss")):
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for key in ("scale", "skipped", "kept_blocks", "tokens"):
            assert one.get(key) == other.get(key), (one, other)
        for key in keys:
            assert (key in one) == (key in other)
            if key in one:
                allowed = tolerance * (100 if key == "gradient_norm" else 1)  # it magnifies what rounding has left
                assert math.isclose(one[key], other[key], rel_tol=allowed, abs_tol=allowed), (one, other, key)


def flags(made):
    """The recipe as options of `hasten train demo`."""
    usual, words = flat(RECIPES["demo"]), []
    for name, value in flat(made).items():
        section, _, field = name.rpartition(".")
        option = "--" + ".".join(filter(None, (section, field.replace("_", "-"))))
        if value is False and usual[name]:
            words.append(f"--{section}.no-{field.replace('_', '-')}")
        elif value != usual[name] and name != "schedule.decay_fraction":  # which has no effect with its schedule
            words += (
                [option]
                if value is True
                else [option, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
            )
    return words
