"""Blocks compiled for training."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hasten.errors import HastenWarning
from hasten.machine import find_compiler
from hasten.model.transformer import Transformer
from hasten.ops.linear.gradient import outside_graphs


def apply_compile(model: Transformer) -> None:
    """Compile each block by itself: one graph serves them all, and compiling takes as long as for one block.

    Blocks that keep a state stay as they are.
    """
    if model.device.type == "cpu" and find_compiler() is None:
        warnings.warn(
            "there is no C++ compiler, so the blocks are not compiled and training is slower; install g++ or clang++ "
            "(hasten doctor says more), or set --techniques.no-compile",
            HastenWarning,
            stacklevel=2,
        )
        return
    outside_graphs()
    # Each kind of layer, in training and in evaluation, is a graph of its own; past the limit blocks are not compiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    # On a CPU, steps may have fewer threads than the one that was compiled (`hasten.machine.contention`).
    options = {"cpp.dynamic_threads": True, "guard_filter_fn": _for_any_threads} if model.device.type == "cpu" else {}
    for block in model.blocks:
        if getattr(block, "mixer", None) is None:  # a graph would have the loop over chunks unrolled
            block.compile(options=options)


def _for_any_threads(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep of a graph: not the one that compiles again for another number of threads.

    It watches the grad mode, too, which goes with the model's mode here: `Validation.loss` calls `eval()`, and a
    module's own mode is guarded.
    """
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]
