"""Decodes several tokens of a batch in one native call, each sampled from the logits after the one before it.

A small model's step takes less time than the Python around it, and a draft model makes several steps in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hasten.model.fused import FusedStack
from hasten.model.fused_linear import norm_fields, weight_fields
from hasten.model.transformer import Transformer
from hasten.ops.cache_plan import CachePlan
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
    """The KV cache of B rows. lengths: cached tokens of a row.

    block_table: int64 (B, blocks), each row's blocks in order, with room for the new tokens.
    """

    plan: CachePlan
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


def can_draft_in_one_call(model: Transformer) -> bool:
    """Whether `draft_in_one_call` supports this model.

    It is to be fused, in one call of all blocks, without learned positions, normalised or per-layer embeddings,
    longrope, scaled queries or logits, adapters or a pattern.
    """
    stack, embedding = model.stack, model.embedding
    plain = isinstance(embedding, nn.Embedding) and embedding.weight.dtype == torch.bfloat16
    own = isinstance(embedding, PackedEmbedding) and embedding.table is model.head and embedding.table.order is None
    whole = isinstance(stack, FusedStack) and stack.plan(model) is not None and stack.times is None
    turned = all(rope.scaling != "longrope" and not rope.query_beta for rope in model.config.ropes)
    turned &= model.config.logit_scale == 1.0
    more = (model.token_features, model.adapters, model.config.attention_pattern)
    others = (model.positions, model.embedding_norm, *more)
    return whole and (plain or own) and turned and all(one is None for one in others)


def draft_in_one_call(
    model: Transformer, tokens: Sequence[Sequence[int]], *, steps: int, cache: Blocks, draws: Draws, ending: Ending
) -> list[list[list[float]]]:
    """Decode `steps` tokens for each of B rows; returns [token, probability] by step and row.

    tokens: each row's tokens that are not in the cache yet, at least one.
    """
    stack, head, config = model.stack, model.head, model.config
    assert isinstance(stack, FusedStack)
    found: Tensor = native_ops().draft_in_one_call.default(
        tokens=torch.tensor([token for own in tokens for token in own]),
        counts=[len(own) for own in tokens],
        starts=cache.lengths,
        most=steps,
        block_table=cache.block_table,
        block_size=cache.block_size,
        frequencies=[table.frequencies for table in model.ropes],
        factors=[rope.attention_factor for rope in config.ropes],
        stack=stack.plan(model),
        cache=cache.plan.whole(),
        table=model.embedding.weight if isinstance(model.embedding, nn.Embedding) else None,
        embedding_scale=config.embedding_scale,
        hidden_size=config.hidden_size,
        **norm_fields(model.norm),
        **weight_fields(head),
        out_features=head.out_features,
        vocab_size=config.vocab_size,
        softcap=config.logit_softcap or 0.0,
        seeds=torch.tensor(draws.seeds),
        steps=torch.tensor(draws.steps),
        temperatures=torch.tensor(draws.temperatures, dtype=torch.float32),
        thresholds=ending.thresholds,
        chances=ending.chances,
        likely=ending.likely,
        floor=ending.floor,
    )
    return found.tolist()
