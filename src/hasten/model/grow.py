"""Several tokens of a batch of sequences in one native call, each drawn from the logits after the one before it.

A small model's step takes less time than Python takes around it, and a model that drafts makes several in a row.
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
    """How the tokens of B rows are drawn, each list of B. temperatures: 0 for the likeliest token.

    seeds, steps: of the noise, steps those of the first draw.
    """

    temperatures: Sequence[float]
    seeds: Sequence[int]
    steps: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The cache of B rows, in the model's dtype: (slots + 1, Hkv, D) a layer. lengths: tokens that it has of each.

    block_table: int64 (B, blocks), each row's in order, with room for what is to come.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    block_table: Tensor
    block_size: int
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """When to end early: when for no row the chance that all its tokens are accepted reaches `floor`.

    likely: of each row so far. chances: that of a token of each kind; its kind is how many of `thresholds` the token's
    share of probability reaches.
    """

    likely: Sequence[float]
    thresholds: Sequence[float]
    chances: Sequence[float]
    floor: float


def can_grow(model: Transformer) -> bool:
    """Whether `grow` takes this model: fused, dense, without learned positions, longrope, adapters or a pattern."""
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
    """The next token of each of B rows and its share of probability, [token, share] by step and row.

    tokens: of each row those that are not in the cache yet, one at least. steps: how many tokens each row gets.
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
