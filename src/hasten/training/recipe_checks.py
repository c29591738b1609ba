"""What values of a recipe cannot work, field by field and together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.training.recipe import Qat, Recipe

LEAST_BETA2 = 0.999  # of one-bit optimizers
# Steps whose speed is measured before `run.minutes` becomes a number of steps; the warm-up must cover them.
CALIBRATION_STEPS = 8
# Fields that must be above 0, by their section.
POSITIVE = {
    "model": ("layers", "hidden_size", "heads", "kv_heads", "feed_forward", "rope_theta", "max_positions"),
    "data": ("vocab_size", "limit_bytes", "context", "batch_size", "accumulation"),
    "optimizer": ("learning_rate", "epsilon", "clip", "freeze_after"),
    "techniques": ("pad_vocabulary_to", "layer_drop", "layer_drop_decay"),
    "lora": ("rank", "alpha"),
    "qat": ("period",),
    "parallel": ("replicas",),
    "diloco": ("sync_every", "learning_rate"),
    "run": ("steps", "epochs", "minutes", "validate_every", "validation_batches", "checkpoint_every"),
}
SHARES_BELOW_1 = (
    *("dropout", "lora.dropout", "data.validation_fraction"),
    *("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "diloco.fragment_update_alpha", "diloco.momentum"),
)
AT_LEAST_0 = (
    *("optimizer.weight_decay", "schedule.warmup_steps", "data.workers"),
    *("qat.mixing_steps", "parallel.prefetch", "diloco.fragment_sync_delay"),
)
# What a number must be: in words, the test, and of which fields.
RANGES: tuple[tuple[str, Callable[[float], bool], Iterable[str]], ...] = (
    ("more than 0", lambda n: n > 0, [f"{section}.{key}" for section, keys in POSITIVE.items() for key in keys]),
    ("at least 0", lambda n: n >= 0, AT_LEAST_0),
    ("at least 0 and less than 1", lambda n: 0 <= n < 1, SHARES_BELOW_1),
    ("from 0 to 1", lambda n: 0 <= n <= 1, ("schedule.final_fraction", "schedule.decay_fraction")),
    ("at most 1", lambda n: n <= 1, ("techniques.layer_drop",)),
)


def wrong_values(recipe: Recipe, values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each; values: the recipe's fields by dotted name."""
    data, run, warmup_steps = recipe.data, recipe.run, recipe.schedule.warmup_steps
    if not recipe.name or recipe.name in (".", "..") or any(c in recipe.name for c in "/\\\0"):
        yield "name must be one folder name"
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}; it must be a finite number"
    for wanted, fits, names in RANGES:
        for name in names:
            number = values[name]
            if isinstance(number, bool) or not isinstance(number, int | float | None):
                yield f"{name} is {number!r} ({type(number).__name__}); it must be a number"
            elif number is not None and not fits(number):
                yield f"{name} is {number}; it must be {wanted}"
    positions = recipe.model.max_positions
    if recipe.init is None and positions is not None and positions < data.context:
        yield f"model.max_positions is {positions} and data.context {data.context}: it must be at least as much"
    if recipe.lora.rank is not None and (recipe.init is None or not recipe.lora.targets):
        yield "lora.rank goes with a model to start from (--init) and with targets (lora.targets)"
    if recipe.lora.rank is not None and recipe.qat.bits is not None:
        yield "lora.rank trains beside frozen weights, and qat.bits trains the weights; choose one of them"
    yield from _wrong_rounding(recipe.qat)
    yield from _wrong_parallel(recipe)
    if run.threads not in (None, "auto") and (type(run.threads) is not int or run.threads < 1):
        yield f"run.threads is {run.threads!r}; it must be at least 1, or auto"
    if run.steps is None and run.epochs is None and run.minutes is None:
        yield "one of run.steps, run.epochs and run.minutes must say when it ends"
    if run.minutes is not None and warmup_steps < CALIBRATION_STEPS:
        yield (
            f"with run.minutes the speed is measured during the warm-up: schedule.warmup_steps must be at least "
            f"{CALIBRATION_STEPS}, and is {warmup_steps}"
        )


def _wrong_parallel(recipe: Recipe) -> Iterator[str]:
    parallel, diloco, optimizer = recipe.parallel, recipe.diloco, recipe.optimizer
    onebit = optimizer.kind.startswith("onebit")
    beside = recipe.lora.rank is not None or recipe.qat.bits is not None
    if beside and (parallel.zero or parallel.policy != "float32-weights"):
        yield "lora and qat are trained with parallel.zero 0 and parallel.policy float32-weights only"
    if parallel.zero not in (0, 1, 2, 3):
        yield f"parallel.zero is {parallel.zero!r}; choose one of 0, 1, 2, 3"
    if parallel.zero == 0 and (parallel.replicas > 1 or parallel.offload == "all"):
        yield "parallel.replicas and parallel.offload all are of shared weights; set parallel.zero to 1, 2 or 3"
    if parallel.policy == "float32-masters" and recipe.techniques.precision in ("auto", "float32"):
        yield "parallel.policy float32-masters needs techniques.precision bfloat16 or float16"
    if diloco.sync_every is not None:
        if parallel.zero:
            yield "diloco.sync_every is for processes that have the whole model; set parallel.zero 0"
        if onebit:
            yield "diloco.sync_every and a one-bit optimizer both say what travels; choose one of them"
        if diloco.fragment_sync_delay >= diloco.sync_every:
            yield "diloco.fragment_sync_delay must be less than diloco.sync_every"
    if onebit and optimizer.beta2 < LEAST_BETA2:
        yield (
            f"optimizer.beta2 is {optimizer.beta2}; one-bit optimizers freeze the variance and need at least "
            f"{LEAST_BETA2}: with less, what was not seen for a while has almost none left, and moves far at each sign"
        )
    if parallel.prefetch and recipe.techniques.layer_drop is not None:
        yield "parallel.prefetch would gather blocks that techniques.layer_drop leaves out; choose one of them"


def _wrong_rounding(qat: Qat) -> Iterator[str]:
    if qat.bits not in (None, 8, 4, 3, 2):
        yield f"qat.bits is {qat.bits!r}; it must be 8, 4, 3 or 2"
    elif qat.group_size not in (0, 32, 64, 128):
        yield f"qat.group_size is {qat.group_size!r}; it must be 32, 64, 128, or 0 for a row"
    elif qat.head not in ("none", "int8", "same") or qat.activations not in ("int8", "float"):
        yield f"qat.head is {qat.head!r} (none, int8 or same) and qat.activations {qat.activations!r} (int8 or float)"
    elif qat.bits is not None and qat.start_bits is not None:
        if not qat.bits < qat.start_bits <= 16:
            yield f"qat.start_bits is {qat.start_bits}; it must be above qat.bits ({qat.bits}) and at most 16"
        if qat.learned_scales:
            yield "qat.start_bits changes the levels, which learned scales cannot follow; give --qat.no-learned-scales"
    if qat.bits is None and (qat.start_bits is not None or qat.stochastic):
        yield "qat.start_bits and qat.stochastic say how training rounds to qat.bits; give that too"
    if qat.bits is not None and qat.stochastic and qat.learned_scales:
        yield "qat.stochastic rounds without learned scales; give --qat.no-learned-scales"
