"""A model split over several ranks: an ordinary model of smaller sizes on each, and where they communicate.

A block's output and down projections give partial sums. `SumOfRanks`, in the place of the norm after them, adds them,
in readable blocks and in fused ones (there inside the native step). Each rank looks up its own part of the vocabulary,
and the logits of all ranks are gathered, so every rank has the same bits and samples the same token.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.config import ModelConfig
from hasten.model.experts import NormedExperts
from hasten.model.norms import RMSNorm
from hasten.model.shares import Share
from hasten.model.swap import take_over
from hasten.model.transformer import Transformer
from hasten.ops.collective import RankGroup
from hasten.ops.linear import PackedLinear


class SumOfRanks(nn.Module):
    """Sums the inputs of all ranks, then applies a norm. summed: computes the sum."""

    def __init__(self, group: RankGroup, norm: nn.Module) -> None:
        super().__init__()
        self.group, self.norm = group, norm
        self.summed: Callable[[Tensor], Tensor] = group.sum

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.summed(x))


class NormOfRanks(nn.Module):
    """x / rms(x) · weight, where rms is over the heads of all ranks and x (…, heads·D) has those of one.

    size: features of all heads. copies: how many ranks have the same heads as this one.
    """

    def __init__(self, group: RankGroup, norm: RMSNorm, *, size: int, copies: int) -> None:
        super().__init__()
        self.group, self.norm, self.size, self.copies = group, norm, size, copies
        self.summed: Callable[[Tensor], Tensor] = group.sum

    def forward(self, x: Tensor) -> Tensor:
        wide, norm = x.float(), self.norm
        squares = self.summed(wide.square().sum(-1, keepdim=True) / self.copies)
        wide = wide * torch.rsqrt(squares / self.size + norm.eps)
        return (wide * (norm.weight.float() + norm.offset)).to(x.dtype)


class RowsOfRank(nn.Module):
    """A GPTQ layer in activation order (desc_act), whose columns cannot be split.

    Each rank holds some output rows with all columns, gathers the inputs x (…, K of a rank) of all ranks, and returns
    (…, N): its rows, and zeros elsewhere, which `SumOfRanks` adds up. `connect` sets the group and the inputs' widths.
    """

    gathered: Callable[[Tensor, Sequence[int]], Tensor]
    widths: list[int]

    def __init__(self, layer: PackedLinear, rows: range, place: nn.Linear) -> None:
        super().__init__()
        self.layer, self.rows, self.bias = layer.eval(), slice(rows.start, rows.stop), place.bias
        self.in_features, self.out_features = place.in_features, place.out_features

    def forward(self, x: Tensor) -> Tensor:
        whole = self.gathered(x.float().contiguous(), self.widths).to(x.dtype)
        y = x.new_zeros(*x.shape[:-1], self.out_features)
        y[..., self.rows] = self.layer(whole)
        return y if self.bias is None else y + self.bias


class ShardedTransformer(Transformer):
    """The model of one rank. `config` has the rank's own sizes (the vocabulary's is whole), and so have the cache, its
    memory and the cost of a step."""

    group: RankGroup
    whole: ModelConfig
    share: Share
    words: list[range]  # of each rank

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        words = self.words[self.group.rank]
        own = (tokens >= words.start) & (tokens < words.stop)
        x = super().embed((tokens - words.start).clamp(0, len(words) - 1), positions)
        return self.group.sum(x.masked_fill(~own[..., None], 0.0))  # all but one of the ranks add zeros

    def finished(self, scores: Tensor, *, out: Tensor | None = None) -> Tensor:
        return super().finished(self.group.gather(scores.float(), [len(words) for words in self.words]), out=out)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss_by_logits(x, targets)


def connect(model: Transformer, group: RankGroup, shares: list[Share], whole: ModelConfig) -> ShardedTransformer:
    """Connect the model of one rank's share with the other ranks. Must be called before the model is fused."""
    assert model.readable
    for block in model.blocks:
        block.attention_post_norm = SumOfRanks(group, block.get_submodule("attention_post_norm"))
        if isinstance(block.mlp, NormedExperts):  # which normalises both of its sums, and adds them
            block.mlp.shared_post_norm = SumOfRanks(group, block.mlp.shared_post_norm)
            block.mlp.expert_post_norm = SumOfRanks(group, block.mlp.expert_post_norm)
        else:
            block.mlp_post_norm = SumOfRanks(group, block.get_submodule("mlp_post_norm"))
        if whole.qk_norm == "projection":
            _connect_norms(block.attention, group, shares, whole)
    for name, module in model.named_modules():
        if isinstance(module, RowsOfRank):
            module.gathered = group.gather
            cuts = [one.cut(f"{name}.weight") for one in shares]
            module.widths = [len(cut.part) for cut in cuts if cut is not None and cut.part is not None]
    sharded = take_over(ShardedTransformer, model)
    sharded.group, sharded.words = group, [share.words for share in shares]
    sharded.share, sharded.whole = shares[group.rank], whole
    return sharded


def _connect_norms(attention: Any, group: RankGroup, shares: list[Share], whole: ModelConfig) -> None:
    """Have the norms over all heads of queries, and of keys, take those of all ranks."""
    own = shares[group.rank]
    copies = sum(own.kv_heads.start in share.kv_heads for share in shares)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    assert isinstance(q_norm, RMSNorm), "no layer norm of all heads is known"
    assert isinstance(k_norm, RMSNorm)
    size = whole.head_dim
    attention.q_norm = NormOfRanks(group, q_norm, size=whole.heads * size, copies=1)
    attention.k_norm = NormOfRanks(group, k_norm, size=whole.kv_heads * size, copies=copies)


def broadcast_from_rank0(model: Transformer, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Broadcast rows of numbers from rank 0; a model that one process holds returns its own."""
    if not isinstance(model, ShardedTransformer):
        return [list(row) for row in rows]
    numbers = iter(model.group.of_first([number for row in rows for number in (len(row), *row)]))
    return [list(islice(numbers, next(numbers))) for _ in rows]
