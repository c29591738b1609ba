"""Decodes several tokens of a batch in one native call, each sampled from the logits after the one before it.

A small model's step takes less time than the Python around it, and a draft model makes several steps in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hasten.model.fused import FusedStack
from hasten.model.fused_linear import norm_arguments, weight_arguments
from hasten.model.transformer import Transformer
from hasten.ops.linear.embedding import PackedEmbedding
from hasten.ops.native import native_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How to sample the tokens of B rows, in lists of B. temperatures: 0 for the most likely token.

    seeds, steps: of the noise; steps are those of the first token.
    """

    temperatures: Sequence[float]
    seeds: Sequence[int]
    steps: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The KV cache of B rows in the model's dtype, (slots + 1, Hkv, D) for each layer. lengths: cached tokens of a row.

    block_table: int64 (B, blocks), each row's blocks in order, with room for the new tokens.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    block_table: Tensor
    block_size: int
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """When to stop early: when no row's chance that all its tokens are accepted reaches `floor`.

    likely: each row's chance so far. chances: acceptance chance of a token by its class, which is the number of
    `thresholds` that the token's probability reaches.
    """

    likely: Sequence[float]
    thresholds: Sequence[float]
    chances: Sequence[float]
    floor: float


def can_grow(model: Transformer) -> bool:
    """Whether `grow` supports this model: fused, dense, without learned positions, longrope, adapters or a pattern."""
    stack, embedding = model.stack, model.embedding
    plain = isinstance(embedding, nn.Embedding) and embedding.weight.dtype == torch.bfloat16
    own = isinstance(embedding, PackedEmbedding) and embedding.table is model.head and embedding.table.order is None
    whole = isinstance(stack, FusedStack) and not stack.opened() and stack.times is None
    turned = all(rope.scaling != "longrope" for rope in model.config.ropes)
    others = (model.positions, model.adapters, model.config.attention_pattern)
    return whole and (plain or own) and turned and all(one is None for one in others)


def grow(
    model: Transformer, tokens: Sequence[Sequence[int]], *, steps: int, cache: Blocks, draws: Draws, ending: Ending
) -> list[list[list[float]]]:
    """Decode `steps` tokens for each of B rows; returns [token, probability] by step and row.

    tokens: each row's tokens that are not in the cache yet, at least one.
    """
    stack, head, config = model.stack, model.head, model.config
    assert isinstance(stack, FusedStack)
    found: Tensor = native_ops().grow.default(
        torch.tensor([token for own in tokens for token in own]),
        *([len(own) for own in tokens], cache.lengths, steps, cache.block_table, cache.block_size),
        *([table.frequencies for table in model.ropes], [rope.attention_factor for rope in config.ropes]),
        *(stack.rope_index, cache.k, cache.v, stack.plans()),
        model.embedding.weight if isinstance(model.embedding, nn.Embedding) else None,
        *(config.embedding_scale, config.hidden_size, *norm_arguments(model.norm)),
        *(*weight_arguments(head), head.out_features, config.vocab_size, config.logit_softcap or 0.0),
        *(torch.tensor(draws.seeds), torch.tensor(draws.steps)),
        torch.tensor(draws.temperatures, dtype=torch.float32),
        *(ending.thresholds, ending.chances, ending.likely, ending.floor),
    )
    return found.tolist()
