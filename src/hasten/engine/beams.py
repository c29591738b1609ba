"""Beam search: the `width` most likely beginnings are kept, each a fork of the one it continues.

The rules are those of transformers' `generate(num_beams=…)`, so that results can be compared: of the best
max(2, 1 + end ids) · width continuations those that end are complete (if among the best `width`), and others go on;
complete texts are ranked by sum of log-probabilities / tokens ** length_penalty; the search ends when the best beam
cannot beat the worst complete text any more (or, with early_stopping, when there are `width` complete ones).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hasten.engine.logprobs import TokenTexts
from hasten.engine.request import Request, TokenLogprob
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import TextSequence


@dataclass(slots=True, eq=False)
class Beam:
    """A text in the search: logprobs of the tokens of its answer, and score, their sum in float32.

    A complete text's score is divided by length ** length_penalty: what texts are ranked by.
    """

    sequence: TextSequence
    score: np.float32
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(taken.token for taken in self.logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The most likely continuations of one beam, best first."""

    logprobs: np.ndarray  # (K,) float32
    tokens: list[int]


class BeamSearch:
    """The state of one search; it forks nothing itself, it says what is to be forked."""

    def __init__(self, request: Request, first: TextSequence, *, end_ids: Collection[int]) -> None:
        self.request, self.end_ids = request, frozenset(end_ids)
        self.width = request.beam_width
        self.kept = max(2, 1 + len(self.end_ids)) * self.width
        self.wanted = max(self.kept, request.logprobs or 0)  # continuations that must be known of each beam
        self.beams = [Beam(first, np.float32(0.0))]
        self.complete: list[Beam] = []  # best first, at most `width`
        self.done = False
        self.candidates: dict[TextSequence, Candidates] = {}  # of the beams that are scored
        self.generated = 0  # tokens of every beam

    def choose(self, texts: TokenTexts) -> list[Beam]:
        """The next step's beams, still with the sequences of those they continue; none when the search is done."""
        known = [self.candidates[beam.sequence] for beam in self.beams]
        totals = np.concatenate([own.logprobs + beam.score for own, beam in zip(known, self.beams, strict=True)])
        origin = [(b, i) for b, own in enumerate(known) for i in range(len(own.tokens))]
        best = [int(i) for i in np.argsort(-totals, kind="stable")[: self.kept] if totals[i] > -np.inf]
        self.generated += 1
        last = self.generated >= self.request.params.max_new_tokens
        going: list[Beam] = []
        full = len(self.complete) == self.width
        ended = list(self.complete)
        for rank, place in enumerate(best):
            b, i = origin[place]
            parent, taken = self.beams[b], self._token_logprob(known[b], i, texts)
            beam = Beam(parent.sequence, totals[place], (*parent.logprobs, taken))
            if not last and taken.token not in self.end_ids:
                going.append(beam)
            elif rank < self.width and not (full and self.request.early_stopping):
                ended.append(replace(beam, score=self._normalized(beam.score)))
        ended.sort(key=lambda text: -text.score)
        self.complete = ended[: self.width]
        self.candidates.clear()
        going = going[: self.width]
        self.done = not going or self._settled(going[0].score)
        return [] if self.done else going

    def _settled(self, best: np.float32) -> bool:
        if len(self.complete) < self.width:
            return False
        return self.request.early_stopping or not self._normalized(best) > self.complete[-1].score

    def _normalized(self, score: np.float32) -> np.float32:
        return score / np.float32(self.generated**self.request.length_penalty)

    def _token_logprob(self, own: Candidates, index: int, texts: TokenTexts) -> TokenLogprob:
        top = self.request.logprobs or 0
        likely = tuple(
            TokenLogprob(t, *texts(t), float(x)) for t, x in zip(own.tokens[:top], own.logprobs, strict=False)
        )
        token = own.tokens[index]
        return TokenLogprob(token, *texts(token), float(own.logprobs[index]), likely)


def advance(
    logits: Tensor,
    scored: Sequence[tuple[BeamSearch, TextSequence]],
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
        if all(beam.sequence in search.candidates for beam in search.beams):
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


def continue_beams(search: BeamSearch, beams: list[Beam], scheduler: Scheduler) -> None:
    """Make the chosen beams those of the next step: forks share every block of the beam they continue."""
    unused = dict.fromkeys(beam.sequence for beam in search.beams)
    chosen = {beam.sequence for beam in beams}
    for sequence in unused:
        if sequence not in chosen:
            scheduler.finish(sequence)
    for beam in beams:
        if beam.sequence in unused:
            del unused[beam.sequence]
        else:
            beam.sequence = scheduler.fork(beam.sequence)
    for beam in beams:  # after all forks
        scheduler.accept(beam.sequence, [beam.logprobs[-1].token])
    search.beams = beams
