"""Guesses at the next tokens of sequences, to be verified in one step. Who guesses well is not decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hasten.serving import sequences
from hasten.serving.samples import Sample

# A guess at the next tokens of a sequence that is about to draw one.
Proposer = Callable[[sequences.Sequence], Sequence[int]]


def guess(propose: Proposer, samples: Iterable[Sample]) -> None:
    """Have the next tokens guessed of samples that are one token behind, no more of them than they may still take."""
    for sample in samples:
        sequence = sample.sequence
        if len(sequence.tokens) - sequence.computed != 1:
            continue
        if sample.constraint is not None or sample.params.needs_history:
            continue  # each of their draws depends on the one before
        room = sample.params.max_new_tokens - sample.count - 1
        sequence.drafts = list(propose(sequence))[: max(0, room)]
