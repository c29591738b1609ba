"""Beam search: the `width` most likely beginnings are kept, each a fork of the one it continues.

The rules are those of transformers' `generate(num_beams=…)`, so that results can be compared: of the best
max(2, 1 + end ids) · width continuations those that end are complete (if among the best `width`), and others go on;
complete texts are ranked by sum of log-probabilities / tokens ** length_penalty; the search ends when the best beam
cannot beat the worst complete text any more (or, with early_stopping, when there are `width` complete ones).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hasten.serving.logprobs import TokenTexts
from hasten.serving.request import Request, TokenLogprob, TopLogprob
from hasten.serving.scheduler import ScheduledSequence, Scheduler


@dataclass(slots=True, eq=False)
class Beam:
    """A text in the search. score: sum of log-probabilities of its answer, float32."""

    sequence: ScheduledSequence
    score: np.float32
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The most likely continuations of one beam, best first."""

    logprobs: np.ndarray  # (K,) float32
    tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class BeamStep:
    """A beam of the next step: `parent` and one token more."""

    parent: Beam
    token: int
    score: np.float32
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class Complete:
    """A text that ended. score: what complete texts are ranked by."""

    score: np.float32
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class BeamSearch:
    """The state of one search; it forks nothing itself, it says what is to be forked."""

    def __init__(self, request: Request, first: ScheduledSequence, *, end_ids: Collection[int]) -> None:
        self.request, self.end_ids = request, frozenset(end_ids)
        self.width = request.beam_width
        self.kept = max(2, 1 + len(self.end_ids)) * self.width
        self.beams = [Beam(first, np.float32(0.0))]
        self.complete: list[Complete] = []  # best first, at most `width`
        self.done = False
        self.candidates: dict[ScheduledSequence, Candidates] = {}  # of the beams that are scored
        self.generated = 0  # tokens of every beam

    @property
    def wanted(self) -> int:
        """Continuations that must be known of each beam."""
        return max(self.kept, self.request.logprobs or 0)

    @property
    def ready(self) -> bool:
        """Whether the continuations of all beams are known."""
        return all(beam.sequence in self.candidates for beam in self.beams)

    def choose(self, texts: TokenTexts) -> list[BeamStep]:
        """The beams of the next step; empty when the search is done."""
        known = [self.candidates[beam.sequence] for beam in self.beams]
        totals = np.concatenate([own.logprobs + beam.score for own, beam in zip(known, self.beams, strict=True)])
        origin = [(b, i) for b, own in enumerate(known) for i in range(len(own.tokens))]
        best = [int(i) for i in np.argsort(-totals, kind="stable")[: self.kept] if totals[i] > -np.inf]
        self.generated += 1
        last = self.generated >= self.request.params.max_new_tokens
        going: list[BeamStep] = []
        full = len(self.complete) == self.width
        ended = list(self.complete)
        for rank, place in enumerate(best):
            b, i = origin[place]
            choice = BeamStep(self.beams[b], known[b].tokens[i], totals[place], self._token_logprob(known[b], i, texts))
            if not last and choice.token not in self.end_ids:
                going.append(choice)
            elif rank < self.width and not (full and self.request.early_stopping):
                ended.append(self._ended(choice))
        ended.sort(key=lambda text: -text.score)
        self.complete = ended[: self.width]
        self.candidates.clear()
        going = going[: self.width]
        self.done = not going or self._settled(going[0].score)
        return [] if self.done else going

    def _settled(self, best: np.float32) -> bool:
        if len(self.complete) < self.width:
            return False
        possible = best / np.float32(self.generated**self.request.length_penalty)
        return self.request.early_stopping or not possible > self.complete[-1].score

    def _ended(self, choice: BeamStep) -> Complete:
        prompt = len(self.request.prompt)
        return Complete(
            score=choice.score / np.float32(self.generated**self.request.length_penalty),
            tokens=(*choice.parent.sequence.tokens[prompt:], choice.token),
            logprobs=(*choice.parent.logprobs, choice.logprob),
        )

    def _token_logprob(self, own: Candidates, index: int, texts: TokenTexts) -> TokenLogprob:
        top = self.request.logprobs or 0
        likely = tuple(TopLogprob(t, *texts(t), float(x)) for t, x in zip(own.tokens[:top], own.logprobs, strict=False))
        token = own.tokens[index]
        return TokenLogprob(token, *texts(token), float(own.logprobs[index]), likely)


def advance(
    logits: Tensor,
    scored: Sequence[tuple[BeamSearch, ScheduledSequence]],
    rows: Sequence[int],
    *,
    texts: TokenTexts,
    scheduler: Scheduler,
) -> tuple[int, list[BeamSearch]]:
    """Continue the searches of which all beams are scored; tokens that were generated, and the searches that are done.

    scored: the beams that got to their last token in this step; rows: of their logits (R, V) float32.
    """
    own = logits[torch.tensor(rows, device=logits.device)]
    for (search, sequence), candidates in zip(scored, candidates_of(own, [one for one, _ in scored]), strict=True):
        search.candidates[sequence] = candidates
    generated, done = 0, []
    for search in dict.fromkeys(search for search, _ in scored):
        if search.ready:
            choices = search.choose(texts)
            generated += len(choices)
            if search.done:
                done.append(search)
            else:
                continue_beams(search, choices, scheduler)
    return generated, done


def candidates_of(logits: Tensor, searches: Sequence[BeamSearch]) -> list[Candidates]:
    """logits (R, V) float32, a row for a beam of each of the searches -> its most likely continuations."""
    logprobs = logits.log_softmax(dim=-1)
    for row, search in zip(logprobs, searches, strict=True):
        if search.generated < search.request.params.min_new_tokens and search.end_ids:
            row[torch.tensor(sorted(search.end_ids), device=row.device)] = -torch.inf
    values, tokens = logprobs.topk(min(max(search.wanted for search in searches), logits.shape[1]), dim=-1)
    return [
        Candidates(row[: search.wanted].numpy(), ids[: search.wanted].tolist())
        for row, ids, search in zip(values.cpu(), tokens.cpu(), searches, strict=True)
    ]


def continue_beams(search: BeamSearch, choices: Sequence[BeamStep], scheduler: Scheduler) -> None:
    """Make the chosen beams of the next step: forks share every block of the beam they continue."""
    unused = dict.fromkeys(beam.sequence for beam in search.beams)
    chosen = {choice.parent.sequence for choice in choices}
    for sequence in unused:
        if sequence not in chosen:
            scheduler.finish(sequence)
    beams = []
    for choice in choices:
        sequence = choice.parent.sequence
        if sequence in unused:
            del unused[sequence]
        else:
            sequence = scheduler.fork(sequence)
        beams.append(Beam(sequence, choice.score, (*choice.parent.logprobs, choice.logprob)))
    for beam, choice in zip(beams, choices, strict=True):  # after all forks
        scheduler.accept(beam.sequence, [choice.token])
    search.beams = beams
