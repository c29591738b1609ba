"""How much memory a training run will take, before any of it is allocated."""

from dataclasses import dataclass

import torch

from hasten.errors import ResourceError
from hasten.machine import available_memory
from hasten.model.config import ModelConfig
from hasten.ops.loss import rows_of_a_chunk
from hasten.planning.cost import parameters
from hasten.training.build import attention_kernel
from hasten.training.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes. state: weights, gradients and AdamW's two means in float32, and the weights in the compute dtype."""

    state: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.state + self.activations + self.logits


def estimate(config: ModelConfig, recipe: Recipe, *, explicit_attention: bool = False) -> MemoryEstimate:
    """What a step keeps at its peak: everything the backward pass will read, after the last forward.

    explicit_attention: the score matrices are kept too.

    A lower bound: it counts what has to be there (as arXiv 2205.05198 does) and no temporaries of single operations.
    So a recipe that would fit is never refused.
    """
    count = parameters(config).total
    size = 4 if recipe.techniques.precision == "float32" else 2  # of an activation
    tokens = recipe.data.batch_size * recipe.data.context
    attention = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    inner = config.intermediate_size
    if config.experts:
        inner = config.expert_size * config.experts_per_token
    # Inputs of the matrix products and of attention, by layer and token: norm, q, k, v, attended, norm, MLP.
    kept = 2 * config.hidden_size + 2 * attention + 2 * kv + inner * (3 if config.gated else 2)
    streams = 2 * 4 * config.hidden_size  # the residual stream before each norm, float32
    layers = len(config.layers)
    activations = tokens * layers * (kept * size + streams)
    if explicit_attention:
        # The probabilities, float32.
        activations += 4 * layers * config.heads * tokens * recipe.data.context
    # The logits in the compute dtype, in float32, their logarithms and the gradient: of all rows, or of a chunk.
    rows = tokens if recipe.techniques.loss == "reference" else min(tokens, rows_of_a_chunk(config.padded_vocab_size))
    logits = rows * config.padded_vocab_size * (size + 12)
    if recipe.techniques.checkpointing == "full":
        # One block at a time is whole, of the others there is the input.
        activations = activations // layers + tokens * layers * 4 * config.hidden_size
    return MemoryEstimate(state=count * (16 + (2 if size == 2 else 0)), activations=activations, logits=logits)


def check_memory(config: ModelConfig, recipe: Recipe, device: torch.device) -> MemoryEstimate:
    """Raise ResourceError, with the numbers and the field to lower, where the estimate is more than there is."""
    explicit = attention_kernel(recipe, device) == "reference"
    need, free = estimate(config, recipe, explicit_attention=explicit), available_memory(device)
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
