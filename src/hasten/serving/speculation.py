"""Guesses at the next tokens of sequences, to be verified in one step. Who guesses well is not decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hasten.serving.request_state import OutputSequence
from hasten.serving.scheduler import ScheduledSequence

# A guess at the next tokens of a sequence that is about to draw one.
Proposer = Callable[[ScheduledSequence], Sequence[int]]


def guess(propose: Proposer, outputs: Iterable[OutputSequence]) -> None:
    """Have the next tokens of output sequences that are one behind guessed, no more than they may still take."""
    for output in outputs:
        sequence = output.sequence
        if len(sequence.tokens) - sequence.computed != 1:
            continue
        if output.constraint is not None or output.params.needs_history:
            continue  # each of their draws depends on the one before
        room = output.params.max_new_tokens - output.count - 1
        sequence.drafts = list(propose(sequence))[: max(0, room)]
