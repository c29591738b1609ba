"""Several tokens of a batch of sequences in one native call, each drawn from the logits after the one before it.

A small model's step takes less time than Python takes around it, and a model that drafts makes several in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hasten.model.fused import FusedStack
from hasten.model.fused_linear import norm_arguments, weight_arguments
from hasten.model.interfaces import Context
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
    """Whether `grow` takes this model: fused, dense, without learned positions or adapters."""
    stack, embedding = model.stack, model.embedding
    plain = isinstance(embedding, nn.Embedding) and embedding.weight.dtype == torch.bfloat16
    own = isinstance(embedding, PackedEmbedding) and embedding.table is model.head and embedding.table.order is None
    whole = isinstance(stack, FusedStack) and not stack.opened() and stack.times is None
    return whole and (plain or own) and model.positions is None and model.adapters is None


def grow(
    model: Transformer,
    tokens: Sequence[int],
    steps: Sequence[Context],
    positions: Sequence[Tensor],
    draws: Draws,
    ending: Ending,
) -> list[list[list[float]]]:
    """The next token of each row and its share of probability, [token, share] by step and row.

    tokens: those of the B rows that are not in the cache yet, end to end, one of each at least. steps: a context and
    positions int64 (1, N) for each; the first step takes the tokens, every other one token more of each row.
    """
    stack, head, config = model.stack, model.head, model.config
    assert isinstance(stack, FusedStack)
    views = [view for step in steps if (view := step.all_layers) is not None]
    ropes = [table(own) for own in positions for table in model.ropes]
    last = views[-1].metadata  # whose block table is the longest
    found: Tensor = native_ops().grow.default(
        torch.tensor(tokens),
        [view.metadata.slot_mapping for view in views],
        [view.metadata.query_start_loc for view in views],
        [view.metadata.seq_lens for view in views],
        last.block_table,
        last.block_size,
        last.rows.rotated,
        [cos for cos, _ in ropes],
        [sin for _, sin in ropes],
        stack.rope_index,
        views[0].k,
        views[0].v,
        stack.plans(),
        model.embedding.weight if isinstance(model.embedding, nn.Embedding) else None,
        config.embedding_scale,
        config.hidden_size,
        *norm_arguments(model.norm),
        *weight_arguments(head),
        head.out_features,
        config.vocab_size,
        config.logit_softcap or 0.0,
        torch.tensor(draws.seeds),
        torch.tensor(draws.steps),
        torch.tensor(draws.temperatures, dtype=torch.float32),
        ending.thresholds,
        ending.chances,
        ending.likely,
        ending.floor,
    )
    return found.tolist()
