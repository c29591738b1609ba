"""How much memory a training step takes, before any of it is allocated."""

from dataclasses import dataclass

from hasten.model.config import ModelConfig
from hasten.ops.loss import rows_of_a_chunk
from hasten.planning.cost import parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes. state: weights, gradients and AdamW's two means, in float32.

    activations: what the forward pass keeps for the backward pass, the weights in the compute dtype included. logits:
    what the loss needs beside them. later_gradients: the part of `state` that is made while activations are given up.
    """

    state: int
    activations: int
    logits: int
    later_gradients: int

    @property
    def total(self) -> int:
        """At the peak: in the loss, or after the backward pass."""
        return self.state + max(0, self.activations + self.logits - self.later_gradients)


def estimate(
    config: ModelConfig,
    *,
    batch_size: int,
    sequence_length: int,
    activation_bytes: int,
    accumulation: int = 1,
    checkpointing: str = "none",
    compiled: bool = True,
    joined_projections: bool = True,
    explicit_attention: bool = False,
    loss: str = "chunked",
) -> MemoryEstimate:
    """What a training step takes at its peak.

    activation_bytes: of one element. joined_projections: of queries, keys and values. explicit_attention: the score
    matrices are kept too. loss: its kernel. The tensors are counted (as arXiv 2205.05198 does) that PyTorch keeps, and
    not the scratch memory of single operations.
    """
    count, size = parameters(config), activation_bytes
    narrow = size if size < 4 else 0  # of a copy beside the one in float32
    tokens, layers = batch_size * sequence_length, len(config.layers)
    loss_bytes = _logits(config, tokens, size, loss) + count.embedding * (4 + narrow)  # and the head's gradient
    block = tokens * _kept_of_a_token(config, size, compiled=compiled, joined=joined_projections)
    if explicit_attention:  # the probabilities
        block += config.heads * tokens * sequence_length * (4 + narrow)
    stream = tokens * 4 * config.hidden_size
    kept = {"none": block, "full": stream, "selective": stream + tokens * size * _products(config)}[checkpointing]
    activations = layers * kept + 2 * stream  # two: of the embedding and the last norm
    activations += max(0, block - kept - loss_bytes)  # the last block is computed again when the logits are gone
    copied = count.total - (count.embedding if count.head else 0)  # all but a table that is only looked up
    return MemoryEstimate(
        state=16 * count.total,
        activations=activations + narrow * copied,
        logits=loss_bytes,
        later_gradients=4 * count.total if accumulation == 1 else 0,
    )


def _kept_of_a_token(config: ModelConfig, size: int, *, compiled: bool, joined: bool) -> int:
    """Bytes that a block keeps of a token."""
    hidden, q, kv, inner = _widths(config)
    # Inputs of the matrix products and of attention: norm, q, k, v, attended, norm, MLP.
    kept = 2 * hidden + 2 * (q + kv) + inner * (3 if config.gated else 2)
    if joined and config.ropes:
        kept += q + kv  # v is a view of all three, so they stay beside the rotated q and k
    if compiled:  # the rest is computed again: the residual stream, and the results of the norms
        return (kept + hidden) * size + 4 * hidden
    return kept * size + 2 * 4 * hidden * (1 if config.norm == "layernorm" else 2)


def _products(config: ModelConfig) -> int:
    """Results of a block's matrix products and attention for a token."""
    hidden, q, kv, inner = _widths(config)
    return 2 * hidden + 2 * (q + kv) + inner * (2 if config.gated else 1)


def _widths(config: ModelConfig) -> tuple[int, int, int, int]:
    inner = config.expert_size * config.experts_per_token if config.experts else config.intermediate_size
    return config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim, inner


def _logits(config: ModelConfig, tokens: int, size: int, loss: str) -> int:
    vocab = config.padded_vocab_size
    if loss == "torch":  # as many logits at a time as the input has elements
        return 4 * tokens * config.hidden_size
    if loss == "reference":  # their logarithms, and the gradients of both, in float32
        return 12 * tokens * vocab
    # The gradient in float32, in the dtype of the products, and as the product reads it.
    return min(tokens, rows_of_a_chunk(vocab)) * vocab * (4 + (2 * size if size < 4 else 0))
