"""Checks that a recipe's values can work together; the valid values of each are in its annotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.training.recipe import Qat, Recipe

LEAST_BETA2 = 0.999  # for one-bit optimizers
# Steps whose speed is measured before `run.minutes` is turned into a number of steps; the warm-up must cover them.
CALIBRATION_STEPS = 8


def wrong_together(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each combination of values that cannot work."""
    data, run, warmup_steps = recipe.data, recipe.run, recipe.schedule.warmup_steps
    if not recipe.name or recipe.name in (".", "..") or any(c in recipe.name for c in "/\\\0"):
        yield "name must be one folder name"
    positions = recipe.model.max_positions
    if recipe.init is None and positions is not None and positions < data.context:
        yield f"model.max_positions is {positions} and must be at least data.context ({data.context})"
    if recipe.lora.rank is not None and (recipe.init is None or not recipe.lora.targets):
        yield "lora.rank needs a model to start from (--init) and targets (lora.targets)"
    if recipe.lora.rank is not None and recipe.model.attention_pattern is not None and recipe.qat.bits is None:
        yield (
            "model.attention_pattern is stored in a model's config.json, and lora.rank writes only an adapter; train "
            "all weights (leave out lora.rank), or train an adapter of a model that has the pattern"
        )
    if recipe.lora.rank is not None and recipe.qat.bits is not None and recipe.lora.dropout:
        yield "qat.bits rounds the adapter together with the weights, which excludes dropout in it; set lora.dropout 0"
    yield from _wrong_rounding(recipe.qat)
    if recipe.qat.init is not None and (recipe.init is None or not recipe.qat.init):
        yield "qat.init is a folder that --init was quantized to; give both"
    if recipe.teacher == "":
        yield "teacher is empty; give a model's folder or hub id"
    yield from _wrong_parallel(recipe)
    if isinstance(run.threads, int) and run.threads < 1:
        yield f"run.threads is {run.threads}; it must be at least 1, or auto"
    if run.steps is None and run.epochs is None and run.minutes is None:
        yield "one of run.steps, run.epochs and run.minutes must be set"
    if run.minutes is not None and warmup_steps < CALIBRATION_STEPS:
        yield (
            f"with run.minutes the speed is measured during the warm-up: schedule.warmup_steps must be at least "
            f"{CALIBRATION_STEPS}, and is {warmup_steps}"
        )


def _wrong_parallel(recipe: Recipe) -> Iterator[str]:
    parallel, optimizer = recipe.parallel, recipe.optimizer
    onebit = optimizer.kind.startswith("onebit")
    rounded = recipe.qat.bits is not None
    if rounded and parallel.policy != "float32-weights":
        yield "qat.bits trains float32 weights; set parallel.policy float32-weights"
    if recipe.qat.eigenvalue_steps and parallel.zero:
        yield "qat.eigenvalue_steps measures whole blocks, which parallel.zero divides; set parallel.zero 0"
    if parallel.zero == 0 and parallel.offload == "all":
        yield "parallel.offload all needs sharded weights; set parallel.zero to 1, 2 or 3"
    if parallel.tensor > 1:
        yield from _wrong_split(recipe)
    if parallel.experts > 1:
        yield from _wrong_experts(recipe)
    if parallel.policy == "float32-masters" and recipe.techniques.precision in ("auto", "float32"):
        yield "parallel.policy float32-masters needs techniques.precision bfloat16 or float16"
    if onebit and parallel.zero:
        yield (
            f"optimizer.kind {optimizer.kind} needs gradient, momentum and error whole on every process (12 of its "
            "20 + 4/N bytes a parameter), so ZeRO cannot shard them; set parallel.zero 0"
        )
    if onebit and optimizer.beta2 < LEAST_BETA2:
        yield (
            f"optimizer.beta2 is {optimizer.beta2}; one-bit optimizers freeze the variance and need at least "
            f"{LEAST_BETA2}: with less, tokens not seen for a while have almost no variance and move far at each sign"
        )
    if parallel.prefetch and recipe.techniques.layer_drop is not None:
        yield "parallel.prefetch would gather blocks that techniques.layer_drop skips; choose one of them"


def _wrong_experts(recipe: Recipe) -> Iterator[str]:
    parallel, kind = recipe.parallel, recipe.optimizer.kind
    if parallel.replicas > 1 or parallel.tensor > 1:
        yield "parallel.experts supports neither parallel.replicas nor parallel.tensor; set them to 1"
    if parallel.offload == "all":
        yield "parallel.experts does not support parallel.offload all; set parallel.offload optimizer"
    if kind.startswith("onebit"):
        yield f"optimizer.kind {kind} averages whole models, which parallel.experts divides; set parallel.experts 1"
    if recipe.qat.eigenvalue_steps:
        yield "qat.eigenvalue_steps measures whole blocks, which parallel.experts divides; set parallel.experts 1"


def _wrong_split(recipe: Recipe) -> Iterator[str]:
    degree = recipe.parallel.tensor
    if recipe.data.context % degree:
        yield f"parallel.tensor is {degree}, and data.context ({recipe.data.context}) must be a multiple of it"
    if recipe.optimizer.kind == "muon":
        yield "optimizer.kind muon needs whole matrices, which parallel.tensor splits by rows and columns; choose adamw"
    if recipe.techniques.loss not in (None, "chunked"):
        yield "parallel.tensor has a chunked loss of its own; leave out techniques.loss"
    if recipe.teacher is not None:
        yield "parallel.tensor does not support a teacher; set parallel.tensor 1"
    if recipe.qat.bits is not None:
        yield "qat.bits rounds whole matrices, which parallel.tensor splits; set parallel.tensor 1"
    if recipe.lora.rank is not None or recipe.dropout:
        yield "parallel.tensor supports neither lora.rank nor dropout; set parallel.tensor 1"


def _wrong_rounding(qat: Qat) -> Iterator[str]:
    if qat.bits is not None and qat.start_bits is not None:
        if not qat.bits < qat.start_bits <= 16:
            yield f"qat.start_bits is {qat.start_bits}; it must be above qat.bits ({qat.bits}) and at most 16"
        if qat.learned_scales:
            yield "qat.start_bits changes the levels, which learned scales cannot follow; give --qat.no-learned-scales"
    if qat.init is not None and (qat.bits not in (3, 4) or not qat.learned_scales):
        yield "qat.init gives start values to learned scales of 4 or 3 bits; give qat.bits 4 or 3, and learn the scales"
    if qat.bits is not None and qat.stochastic and qat.learned_scales:
        yield "qat.stochastic rounds without learned scales; give --qat.no-learned-scales"
