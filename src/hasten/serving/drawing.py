"""From the logits of a step to what each sample takes: the draw, its log-probabilities, and guesses that were right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.serving.groups import SequenceGroup
from hasten.serving.logprobs import TokenTexts, token_logprobs
from hasten.serving.request import TokenLogprob
from hasten.serving.sampler import Sampler
from hasten.serving.samples import Sample


@dataclass(slots=True)
class Drawn:
    """What one sample takes in this step. failure: why its constraint allows nothing, if so."""

    group: SequenceGroup
    sample: Sample
    row: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    failure: str | None = None


def draw(logits: Tensor, takers: Sequence[Drawn], sampler: Sampler, texts: TokenTexts) -> None:
    """Fill in what the takers take. logits (R, V) float32; a taker's row, and one more for each guess behind it.

    A guess is right if it is what is drawn at its place, from the same logits and noise as without guessing: so the
    text is the same, and the more of them are right, the sooner.
    """
    rows: list[int] = []
    samples: list[Sample] = []
    steps: list[int] = []
    for taker in takers:
        sample = taker.sample
        for i in range(1 + len(sample.sequence.drafts)):
            rows.append(taker.row + i)
            samples.append(sample)
            steps.append(sample.count + i)
    if rows != list(range(len(logits))):  # several samples of one row, or rows of a prompt's log-probabilities
        logits = logits[torch.tensor(rows, device=logits.device)]
    wanting = _wanting(takers)
    raw = logits[torch.tensor(list(wanting), device=logits.device)] if wanting else None  # constraints mask in place
    tokens = sampler.draw(logits, samples, steps)
    told: Iterator[TokenLogprob] = iter([])
    if raw is not None:
        told = iter(token_logprobs(raw, [tokens[i] for i in wanting], tops=list(wanting.values()), texts=texts))
    at = 0
    for taker in takers:
        drafts, taken = taker.sample.sequence.drafts, 1
        while taken <= len(drafts) and drafts[taken - 1] == tokens[at + taken - 1]:
            taken += 1
        taker.tokens = tokens[at : at + taken]
        if taker.group.wants_logprobs:
            taker.logprobs = [next(told) for _ in range(1 + len(drafts))][:taken]
        taker.failure = sampler.failures.get(at)
        at += 1 + len(drafts)


def _wanting(takers: Sequence[Drawn]) -> dict[int, int]:
    """Of the drawn rows, those whose log-probabilities are wanted, and how many alternatives."""
    found: dict[int, int] = {}
    at = 0
    for taker in takers:
        count = 1 + len(taker.sample.sequence.drafts)
        if taker.group.wants_logprobs:
            found |= dict.fromkeys(range(at, at + count), taker.group.request.logprobs or 0)
        at += count
    return found
