"""How much memory a training run will take, before any of it is allocated."""

from dataclasses import dataclass

from hasten.model.config import ModelConfig
from hasten.ops.loss import rows_of_a_chunk
from hasten.planning.cost import parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes. state: weights, gradients and AdamW's two means in float32, and the weights in the compute dtype."""

    state: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.state + self.activations + self.logits


def estimate(
    config: ModelConfig,
    *,
    batch_size: int,
    sequence_length: int,
    activation_bytes: int,
    checkpointing: bool = False,
    explicit_attention: bool = False,
    all_logits: bool = False,
) -> MemoryEstimate:
    """What a training step keeps at its peak: everything the backward pass will read, after the last forward.

    activation_bytes: of one element. checkpointing: of whole blocks. explicit_attention: the score matrices are kept
    too. all_logits: those of all rows at once, not of a chunk.

    A lower bound: it counts what has to be there (as arXiv 2205.05198 does) and no temporaries of single operations.
    So a recipe that would fit is never refused.
    """
    count = parameters(config).total
    size = activation_bytes
    tokens = batch_size * sequence_length
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
        activations += 4 * layers * config.heads * tokens * sequence_length
    # The logits in the compute dtype, in float32, their logarithms and the gradient: of all rows, or of a chunk.
    rows = tokens if all_logits else min(tokens, rows_of_a_chunk(config.padded_vocab_size))
    logits = rows * config.padded_vocab_size * (size + 12)
    if checkpointing:
        # One block at a time is whole, of the others there is the input.
        activations = activations // layers + tokens * layers * 4 * config.hidden_size
    return MemoryEstimate(state=count * (16 + (2 if size == 2 else 0)), activations=activations, logits=logits)
