"""Creates the step of a model that is trained as one function (CUDA): in FP8, compiled as one graph, or captured."""

from collections.abc import Callable

import torch

from hasten.distributed.placement import Placement
from hasten.errors import ConfigError
from hasten.model.transformer import Transformer
from hasten.ops import fp8, triton_support
from hasten.ops.linear.gradient import outside_graphs
from hasten.training.capture import CapturedStep
from hasten.training.fp8_model import Fp8Model
from hasten.training.precision import Precision
from hasten.training.recipe import Recipe
from hasten.training.step import TrainStep
from hasten.training.update import why_not_fixed
from hasten.training.whole import WholeModel


def check_fp8(model: Transformer, recipe: Recipe, precision: Precision, by_blocks: str | None) -> None:
    """Raise ConfigError if the products cannot run in FP8. by_blocks: why the model is not one function, or None."""
    reason = fp8.why_not(model.device)
    if reason is None and by_blocks is not None:
        reason = f"it needs a model that is trained as one function, and this one is not: {by_blocks}"
    if reason is None and recipe.techniques.compile and recipe.techniques.compile_whole:
        reason = "its gradients are written by hand and cannot be compiled; switch techniques.compile_whole off"
    if reason is None and precision.dtype != torch.bfloat16:
        reason = f"it needs techniques.precision bfloat16; it is {recipe.techniques.precision}"
    config = model.config
    sizes = {
        "tokens of a batch": recipe.data.batch_size * recipe.data.context,
        "rows of the padded vocabulary": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "features of all query heads": config.head_dim * config.heads,
        "features of all key heads": config.head_dim * config.kv_heads,
    }
    odd = next((f"{name}: {size}" for name, size in sizes.items() if size % fp8.MULTIPLE), None)
    if reason is None and odd is not None:
        reason = f"rows and columns must be multiples of {fp8.MULTIPLE}; {odd}"
    heads = config.head_dim * (config.heads + 2 * config.kv_heads)
    widths = config.hidden_size, config.intermediate_size * (2 if config.gated else 1), heads
    if reason is None and max(widths) > fp8.WIDEST:
        reason = f"a row of {max(widths)} numbers is wider than its kernels support ({fp8.WIDEST})"
    if reason is not None:
        raise ConfigError(f"techniques.fp8 cannot be used here: {reason}")


def whole_step(
    model: Transformer,
    recipe: Recipe,
    placement: Placement,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainStep:
    """Create the step of the whole model as one function, captured if possible, compiled if the recipe says so."""
    techniques = recipe.techniques
    compiles = techniques.compile and (techniques.compile_whole or triton_support.refusal(model.device) is not None)
    if compiles:
        outside_graphs()
    kind = Fp8Model if techniques.fp8 else WholeModel
    whole = kind(model, dtype=precision.dtype, compiles=compiles)
    placement.module = whole
    reason = why_not_captured(recipe, optimizer, precision)
    compiled = "compiled as one graph" if compiles else "not compiled: hasten's kernels"
    if reason is not None:
        return TrainStep(
            model,
            optimizer,
            precision,
            clip=recipe.optimizer.clip,
            should_stop=should_stop,
            placement=placement,
            how=f"the model is one function, {compiled}; steps are not captured: {reason}",
        )
    return CapturedStep(
        model,
        optimizer,
        precision,
        clip=recipe.optimizer.clip,
        should_stop=should_stop,
        placement=placement,
        copies=precision.dtype != torch.float32,
        whole=whole,
        how=f"the model is one function, its steps are CUDA graphs; {compiled}",
    )


def why_not_captured(recipe: Recipe, optimizer: torch.optim.Optimizer, precision: Precision) -> str | None:
    """Why the steps of a whole model are not captured, or None."""
    if not recipe.techniques.capture:
        return "techniques.capture is off"
    if precision.scales:
        return "the loss is scaled for float16, and steps that overflow are skipped"
    return why_not_fixed(optimizer)
