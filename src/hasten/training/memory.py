"""Refusing a recipe that will not fit, before any of it is allocated."""

from dataclasses import replace
from pathlib import Path

import torch

from hasten.distributed.ranks import ALONE, Ranks
from hasten.errors import ResourceError
from hasten.machine import available_memory, resolve_dtype
from hasten.model.config import ModelConfig
from hasten.ops.loss import KERNELS, LossRequest
from hasten.ops.picker import pick
from hasten.planning.cost import parameters
from hasten.planning.memory import MemoryEstimate, estimate
from hasten.planning.sharing import fsdp_bytes
from hasten.training.build import attention_kernel, lora_adapter
from hasten.training.recipe import Recipe


def step_memory(
    config: ModelConfig, recipe: Recipe, device: torch.device, *, init: Path | None = None, ranks: Ranks = ALONE
) -> MemoryEstimate:
    """The estimate for a recipe's own batch and techniques, of one rank.

    init: the model's folder, as large as a frozen model is.
    """
    techniques = recipe.techniques
    dtype = resolve_dtype(techniques.precision, auto=torch.bfloat16)
    parallel = recipe.parallel
    loss = pick(KERNELS, LossRequest(device=device, dtype=dtype, softcap=config.logit_softcap), forced=techniques.loss)
    found = estimate(
        config,
        batch_size=ranks.rows(recipe.data.batch_size),
        sequence_length=recipe.data.context,
        activation_bytes=dtype.itemsize,
        accumulation=recipe.data.accumulation,
        checkpointing=techniques.checkpointing,
        compiled=techniques.compile,
        joined_projections=techniques.joined_projections and device.type == "cpu",
        explicit_attention=attention_kernel(recipe, device) == "reference",
        loss=loss.name,
    )
    if ranks.size > 1 and parallel.zero:
        shared = ranks.size // parallel.replicas
        bytes_ = fsdp_bytes(config, stage=parallel.zero, ranks=shared, accumulation=recipe.data.accumulation)
        return replace(found, state=int(bytes_.peak), later_gradients=0)
    if init is None or recipe.lora.rank is None:
        return found
    frozen = sum(path.stat().st_size for path in init.glob("*.safetensors"))
    if recipe.lora.base == "float32":
        frozen = max(frozen, 4 * parameters(config).total)
    factors = {id(one): one.numel() for own in lora_adapter(config, recipe.lora).values() for one in (own.a, own.b)}
    return replace(found, state=frozen + 16 * sum(factors.values()), later_gradients=0)


def check_memory(
    config: ModelConfig, recipe: Recipe, device: torch.device, *, init: Path | None = None, ranks: Ranks = ALONE
) -> MemoryEstimate:
    """Raise ResourceError, with the numbers and the field to lower, where the estimate is more than there is."""
    need, free = step_memory(config, recipe, device, init=init, ranks=ranks), available_memory(device)
    if device.type == "cpu":  # all of this machine's processes take from the same
        free //= ranks.local_size
    if need.total <= free:
        return need
    if need.state > free:
        remedy = "lower model.layers or model.hidden_size"
    else:
        remedy = f"lower data.batch_size (now {recipe.data.batch_size}) and raise data.accumulation by as much"
        if recipe.data.batch_size == 1:
            remedy = f"lower data.context (now {recipe.data.context}), model.layers or model.hidden_size"
    raise ResourceError(
        f"recipe {recipe.name!r} needs about {_gb(need.total)} on {device} and {_gb(free)} are free: "
        f"{_gb(need.state)} for {parameters(config).total:,} weights with their gradients and optimizer state, "
        f"{_gb(need.activations)} for activations and {_gb(need.logits)} for logits of "
        f"{recipe.data.batch_size} x {recipe.data.context} tokens; {remedy}"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
