"""Compares two models on a text: Kullback-Leibler divergence of their next-token distributions, and perplexities."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.evaluation.perplexity import Padded, Window, batches, cut_windows, exp, scoring_context
from hasten.model.transformer import Transformer
from hasten.ops.draw import likeliest

ROWS = 256  # of which both models' logits are in memory


@dataclass(frozen=True, slots=True)
class Divergence:
    """The result of `divergence`.

    perplexity: of the model; against_perplexity: of the other one. kl_mean and kl_99: mean and 99th percentile over the
    tokens of the divergence from the other model, in nats. top1: share of tokens for which both models have the same
    most likely token. tokens: number of predicted tokens.
    """

    perplexity: float
    against_perplexity: float
    kl_mean: float
    kl_99: float
    top1: float
    tokens: int


@torch.inference_mode()
def divergence(
    model: Transformer,
    against: Transformer,
    documents: Iterable[str | Sequence[int]],
    *,
    context: int | None = None,
    stride: int | None = None,
    kv_cache_dtype: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Divergence:
    """Compare a model with another one, token by token: KL(against ‖ model) = Σ p·log(p / q), p of `against`.

    Arguments as in `perplexity`; kv_cache_dtype is that of `model`, and `against` keeps its own dtype. Both score the
    same windows, each by its own kernels. Raises ConfigError as it does, and for models that tokenize the text
    differently.
    """
    documents = list(documents) if not isinstance(documents, str) else documents
    cut, _ = cut_windows(model, documents, context=context, stride=stride)
    other, _ = cut_windows(against, documents, context=context, stride=stride)
    if model.config.vocab_size != against.config.vocab_size or not _same(cut, other):
        raise ConfigError(
            "these two models cannot be compared token by token: they have another vocabulary, tokenizer or number of "
            "positions (--context sets the last)"
        )
    total = sum(len(window.tokens) - window.first for window in cut)
    losses, against_losses, divergences, same = 0.0, 0.0, [], 0
    for own in batches(cut, model.device):
        states = [_states(model, own, kv_cache_dtype), _states(against, own, "auto")]
        for start in range(0, len(own.rows), ROWS):
            part = slice(start, start + ROWS)
            q, p = (
                one.scores(x[part].to(one.device)).to(model.device).log_softmax(dim=-1)
                for one, x in zip((model, against), states, strict=True)
            )
            targets = own.targets[part, None]
            losses -= float(q.gather(1, targets).double().sum())
            against_losses -= float(p.gather(1, targets).double().sum())
            same += int((likeliest(q) == likeliest(p)).sum())
            divergences.append((p.exp() * (p - q)).sum(dim=-1).double())
        progress(sum(len(part) for part in divergences), total)
    found = torch.cat(divergences)
    return Divergence(
        perplexity=exp(losses / total),
        against_perplexity=exp(against_losses / total),
        kl_mean=float(found.mean()),
        kl_99=float(found.kthvalue(math.ceil(0.99 * len(found))).values),
        top1=same / total,
        tokens=total,
    )


def _states(model: Transformer, own: Padded, kv_cache_dtype: str) -> Tensor:
    """Hidden states (R, C) after the last block, at the scored rows."""
    device = model.device
    positions = own.positions.to(device)
    context = scoring_context(model, positions, kv_cache_dtype)
    return model.states(own.tokens.to(device), positions, context).flatten(0, -2)[own.rows.to(device)]


def _same(one: Sequence[Window], other: Sequence[Window]) -> bool:
    firsts = [[window.first for window in cut] for cut in (one, other)]
    return firsts[0] == firsts[1] and all(torch.equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
