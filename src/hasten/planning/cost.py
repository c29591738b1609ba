"""Counts parameters, floating-point operations and bytes of a decoder, from its config alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hasten.model.config import LayerConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights.

    head: 0 if it is the embedding's matrix. active: multiplied for one token; of the experts only the chosen ones, and
    what all tokens pass beside them. table: of per-layer embeddings, of which a token takes one row.
    """

    total: int
    embedding: int
    head: int
    active: int
    table: int = 0


def parameters(config: ModelConfig) -> Parameters:
    """Count the weights of a model, padded vocabulary included."""
    embedding = config.padded_vocab_size * config.hidden_size
    head = 0 if config.tie_embeddings else embedding
    positions = config.max_positions * config.hidden_size if config.learned_positions else 0
    blocks = active = 0
    for layer in config.layers:
        own, used = _block(config, layer)
        blocks += own
        active += used
    norm = config.hidden_size * _per_norm(config) * (1 + config.embedding_norm)
    features = len(config.layers) * config.token_features  # of a token, for all blocks
    table, projection = config.token_vocab_size * features, config.hidden_size * features
    total = embedding + head + positions + blocks + norm + table + projection
    total += config.token_features * _per_norm(config)
    active += embedding + projection
    return Parameters(total=total, embedding=embedding, head=head, active=active, table=table)


def matrices(config: ModelConfig, layer: LayerConfig) -> tuple[int, int]:
    """Number of weights in a block's matrices: all, and those used for one token."""
    hidden, products = config.hidden_size, 3 if config.gated else 2
    attention = sum(a * b for a, b in _shapes(config, layer)) + hidden * 2 * config.token_features
    if not layer.experts:
        return (attention + products * hidden * config.inner_of(layer),) * 2
    around = attention + hidden * (config.experts + config.shared_gate + 2 * config.expert_latent)
    around += products * hidden * config.shared_size
    one = products * config.expert_width * config.expert_size
    return around + config.experts * one, around + config.experts_per_token * one


def _shapes(config: ModelConfig, layer: LayerConfig) -> list[tuple[int, int]]:
    """Both sizes of each matrix of a block's attention, or of the layer in its place."""
    hidden = config.hidden_size
    if not layer.mixes:
        return []
    if layer.keeps_state:
        widths = [*config.state_mixer.inputs.values(), config.state_mixer.values]
    elif (sizes := config.latent) is not None:
        queries, rank = config.heads * sizes.query_dim, sizes.query_rank
        of_queries = [(hidden, queries)] if rank is None else [(hidden, rank), (rank, queries)]
        around = [(hidden, sizes.kept), (config.heads * sizes.value_dim, hidden)]
        return [*of_queries, *around, (sizes.rank, head_products(config) // sizes.rank)]
    else:
        size = config.head_dim_of(layer)
        wide, kv = config.heads * size, config.kv_heads_of(layer) * size
        own = 0 if layer.keys_of is not None else kv
        widths = [wide * (1 + config.attention_gate), own, own * (not layer.values_of_keys), wide]
    return [(hidden, width) for width in widths]


def head_products(config: ModelConfig) -> int:
    """Weights of a layer that are multiplied head by head, and never quantized: those of keys and values of latents."""
    sizes = config.latent
    return 0 if sizes is None else sizes.rank * config.heads * (sizes.key_dim + sizes.value_dim)


def muon_flops(config: ModelConfig) -> float:
    """FLOPs of an update by Muon: five Newton-Schulz iterations of every matrix, with three products each."""
    hidden, total = config.hidden_size, 0
    for layer in config.layers:
        products, widths = 3 if config.gated else 2, [config.token_features] * 2
        shapes = _shapes(config, layer)
        if layer.experts:
            shapes += [(config.expert_width, config.expert_size)] * config.experts * products
            widths += [config.shared_size] * products + [config.experts] + [1] * config.shared_gate
            widths += [config.expert_latent] * 2
        else:
            widths += [config.inner_of(layer)] * products
        for shape in shapes + [(hidden, width) for width in widths]:
            low, high = sorted(shape)
            total += 5 * (4 * low**2 * high + 2 * low**3)
    return float(total)


def _per_norm(config: ModelConfig) -> int:
    """Number of weights of a norm for each feature."""
    if not config.norm_weights:
        return 0
    return 2 if config.norm == "layernorm" and config.norm_bias else 1


def _block(config: ModelConfig, layer: LayerConfig) -> tuple[int, int]:
    """Number of weights in a block: all, and those used for one token."""
    hidden, size, per_norm = config.hidden_size, config.head_dim_of(layer), _per_norm(config)
    vectors = hidden * per_norm * (config.norms_of(layer) + (config.token_features > 0)) + config.block_scales
    if layer.keeps_state:
        mixer = config.state_mixer
        vectors += sum(mixer.vectors.values()) + (sum(mixer.inputs.values()) + hidden) * mixer.bias
    elif layer.mixes and (latent := config.latent) is not None:
        rank = latent.query_rank or 0
        vectors += rank + latent.rank + (rank + latent.kept) * config.qkv_bias + hidden * config.output_bias
    elif layer.mixes:
        widths = [width for _, width in _shapes(config, layer)]
        vectors += sum(widths[:3]) * config.qkv_bias + hidden * config.output_bias
        if config.qk_norm is not None:
            keeps = layer.keys_of is None
            whole = config.heads + config.kv_heads_of(layer) * keeps
            vectors += size * per_norm * (whole if config.qk_norm == "projection" else 1 + keeps)
        vectors += config.heads * config.attention_sinks
    inner, every, used = config.inner_of(layer), int(layer.mlp), int(layer.mlp)
    if layer.experts:
        inner, every, used = config.expert_size, config.experts, config.experts_per_token
        vectors += config.experts * (config.expert_choice_bias + config.router_bias)
        vectors += _mlp_biases(config, config.shared_size) if config.shared_size else 0
        vectors += (hidden * (3 * per_norm + 1) + config.experts) * config.expert_norms
    elif config.activation == "xielu":
        vectors += 2 * layer.mlp
    biases = _mlp_biases(config, inner)
    own, active = matrices(config, layer)
    return own + vectors + every * biases, active + vectors + used * biases


def expert_weights(config: ModelConfig) -> int:
    """Number of weights in the experts that tokens are routed to, of all layers."""
    own = config.expert_width * (3 if config.gated else 2) * config.expert_size
    own += _mlp_biases(config, config.expert_size)
    return sum(config.experts * own for layer in config.layers if layer.experts)


def _mlp_biases(config: ModelConfig, inner: int) -> int:
    """Number of biases in an MLP of `inner` features."""
    return (inner * (2 if config.gated else 1) + config.hidden_size) * config.mlp_bias


def _attended(layer: LayerConfig, length: int) -> float:
    """Mean number of keys that a token of a causal sequence of `length` tokens sees in this layer."""
    window = length if layer.window is None else min(layer.window, length)
    # The first `window` tokens see 1 … window keys, every later one sees `window`.
    return (window * (window + 1) / 2 + (length - window) * window) / length


def attended_by_pattern(config: ModelConfig, length: int) -> float:
    """Mean number of keys that a token of a causal sequence of `length` sees in each layer of a model with a pattern.

    It sees whole blocks, and half of the one on the diagonal.
    """
    pattern = config.attention_pattern
    assert pattern is not None
    layout = pattern.layout(-(-length // pattern.block), heads=config.heads)
    rows = layout.blocks_q * len(layout.heads)
    return min(layout.present / rows * layout.block - (layout.block - 1) / 2, (length + 1) / 2)


def forward_flops_per_token(
    config: ModelConfig, sequence_length: int, *, scored: int | None = None, cached: bool = False
) -> float:
    """FLOPs of a forward pass per token, averaged over a causal sequence: 2 per weight used, 4·H·D per key seen.

    scored: number of tokens whose logits are computed; None: all, as in training; 1 for a prompt. cached: keys and
    values are read from a cache, where latent attention multiplies latents, which are wider than a head.
    """
    attending = [layer for layer in config.layers if layer.attends]
    if config.attention_pattern is None:
        seen = sum(_head_sizes(config, layer, cached) * _attended(layer, sequence_length) for layer in attending)
    else:
        each = (_head_sizes(config, layer, cached) for layer in attending)
        seen = sum(each) * attended_by_pattern(config, sequence_length)
    weights, unscored = parameters(config), 0.0 if scored is None else 1 - scored / sequence_length
    mixed = 2 * config.heads * seen + _state_flops(config)
    return 2 * (weights.active - unscored * weights.embedding) + mixed


def _head_sizes(config: ModelConfig, layer: LayerConfig, cached: bool) -> int:
    """Numbers that a head multiplies of a key and its value together."""
    if (sizes := config.latent) is not None:
        return sizes.kept + sizes.rank if cached else sizes.query_dim + sizes.value_dim
    return 2 * config.head_dim_of(layer)


def _state_flops(config: ModelConfig) -> float:
    """FLOPs for each token in all layers that keep states: its products with their matrices.

    (What the convolution multiplies is counted among the weights.)
    """
    mixer = config.mixer
    if mixer is None:
        return 0.0
    return 2.0 * mixer.passes * mixer.numbers * sum(layer.keeps_state for layer in config.layers)


def training_flops_per_token(config: ModelConfig, sequence_length: int, *, kept: float = 1.0) -> float:
    """FLOPs of forward and backward per token: three times the forward pass (PaLM, arXiv 2204.02311, appendix B).

    Counts only keys that a causal mask leaves visible, and no recomputation: the model's FLOPs (MFU), not the
    hardware's. kept: share of the blocks that run, under layer dropping.
    """
    around = 3 * forward_flops_per_token(replace(config, layers=()), sequence_length)
    return around + kept * (3 * forward_flops_per_token(config, sequence_length) - around)


def kv_bytes_per_token(config: ModelConfig, element_bytes: float) -> int:
    """Bytes of keys and values kept for one token: 2 · Hkv · D · element size, of the layers that keep them."""
    return int(sum(kept_numbers(config, layer) for layer in keeping_layers(config)) * element_bytes)


def keeping_layers(config: ModelConfig) -> list[LayerConfig]:
    """The layers that keep keys and values of their own."""
    return [layer for layer in config.layers if layer.attends and layer.keys_of is None]


def key_numbers(config: ModelConfig, layer: LayerConfig) -> int:
    """Numbers in the keys of a token that a layer sees: Hkv · D."""
    return config.kv_heads_of(layer) * config.head_dim_of(layer)


def kept_numbers(config: ModelConfig, layer: LayerConfig) -> int:
    """Numbers in the keys and values of a token that a layer sees: 2 · Hkv · D, or once what is both (latents)."""
    return key_numbers(config, layer) * (1 if config.latent is not None else 2)


def state_bytes(config: ModelConfig, element_bytes: float) -> int:
    """Bytes that layers keep of one sequence, whatever its length: float32 matrices, and inputs of the convolution."""
    if config.mixer is None:
        return 0
    tensors = config.mixer.state.values()
    each = sum(math.prod(one.size) * (4 if one.wide else element_bytes) for one in tensors)
    return int(sum(layer.keeps_state for layer in config.layers) * each)


def decode_bytes_per_token(
    config: ModelConfig, *, weight_bytes: float, kv_bytes: float, context: int, batch: int = 1
) -> float:
    """Bytes that must be read for each token when `batch` sequences of `context` tokens are decoded together.

    A step computes one token for each sequence. It reads every weight used in a product once (the embedding only as
    the head; looking up a token reads one row), and each sequence's cached keys and values that its token sees. States
    of layers are read and written.
    """
    cache = kv_bytes * sum(_kept_read(config, context)) + 2 * state_bytes(config, kv_bytes)
    return _weights_read(config, batch) * weight_bytes / batch + cache


def _weights_read(config: ModelConfig, tokens: int) -> float:
    """Mean number of weights that a step over `tokens` tokens reads: experts only if at least one token chose them.

    A token does not choose an expert with probability 1 - k/E, independently and uniformly.
    """
    total = float(parameters(config).active)
    for layer in config.layers:
        if layer.experts and config.experts > config.experts_per_token:
            own, used = _block(config, layer)
            others = (own - used) / (config.experts - config.experts_per_token)  # weights of one expert
            read = config.experts * (1 - (1 - config.experts_per_token / config.experts) ** tokens)
            total += (read - config.experts_per_token) * others
    return total


def _kept_read(config: ModelConfig, context: int) -> Iterator[int]:
    """Numbers in all keys and values that a query of each layer reads."""
    reach = None if config.attention_pattern is None else config.attention_pattern.reach
    for layer in config.layers:
        if not layer.attends:
            continue
        window = min(filter(None, (reach, layer.window)), default=None)
        yield kept_numbers(config, layer) * (context if window is None else min(window, context))
