"""A model of which each of several ranks holds a share: an ordinary one of smaller sizes, and where the ranks meet.

A block's output and down put out parts of a sum; it is made by `SumOfRanks`, which stands where the norm after them
stands, in readable blocks and in fused ones (there inside the native step). Each rank looks up the words that it holds,
and the logits of all are put side by side: then every rank has the same bits, and draws the same token from them.
"""

from collections.abc import Sequence
from itertools import islice

from torch import Tensor, nn

from hasten.model.config import ModelConfig
from hasten.model.shares import Share
from hasten.model.swap import take_over
from hasten.model.transformer import Transformer
from hasten.ops.collective import RankGroup


class SumOfRanks(nn.Module):
    """The sum of what all ranks put in, then a norm."""

    def __init__(self, group: RankGroup, norm: nn.Module) -> None:
        super().__init__()
        self.group, self.norm = group, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.group.sum(x))


class ShardedTransformer(Transformer):
    """The model of one rank. `config` has the rank's own sizes, but for the vocabulary's, and so has all that follows
    from it: the cache, its memory, the cost of a step."""

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
    """The model of a rank's share, from now on with the others'. To be called before it is fused."""
    assert model.readable
    for block in model.blocks:
        block.attention_post_norm = SumOfRanks(group, block.get_submodule("attention_post_norm"))
        block.mlp_post_norm = SumOfRanks(group, block.get_submodule("mlp_post_norm"))
    sharded = take_over(ShardedTransformer, model)
    sharded.group, sharded.words = group, [share.words for share in shares]
    sharded.share, sharded.whole = shares[group.rank], whole
    return sharded


def told_by_first(model: Transformer, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first rank's numbers, as many rows of them as here; its own of a model that one process holds."""
    if not isinstance(model, ShardedTransformer):
        return [list(row) for row in rows]
    told = iter(model.group.of_first([number for row in rows for number in (len(row), *row)]))
    return [list(islice(told, next(told))) for _ in rows]
