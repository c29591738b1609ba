"""The next tokens of all samples that got to their last token in this step: one batched draw.

A row's token depends on its own logits, settings, seed and step alone (see `hasten.generation.sampling`): it does not
matter who else is drawn for. What is laid out for a set of rows is kept until the set changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hasten.generation.sampling import History, RowParams, next_tokens
from hasten.generation.stopping import stop_ids
from hasten.serving.request import Constraint
from hasten.serving.samples import Sample


class Sampler:
    """Draws for a changing set of rows."""

    def __init__(self, *, vocab_size: int, eos_ids: Collection[int], device: torch.device) -> None:
        self.vocab_size, self.eos_ids, self.device = vocab_size, frozenset(eos_ids), device
        self._key: tuple[int, ...] = ()
        self._drawn: list[int] = []  # indices of the rows that are more than an argmax
        self._rows: Tensor | None = None  # the same, where they are not all
        self._params: RowParams | None = None
        self._history: History | None = None
        self.failures: dict[int, str] = {}  # of the last draw: rows whose constraint raised or left no token

    def draw(self, logits: Tensor, samples: Sequence[Sample], steps: Sequence[int]) -> list[int]:
        """logits (R, V) float32, one row a sample (masked by its constraint in place) -> a token each.

        steps: how many tokens each sample has before this one. Rows with penalties or constraints stand for one step.
        """
        key = tuple(sample.sequence.number for sample in samples)
        self.failures.clear()
        if key != self._key:
            self._arrange(samples)
            self._key = key
        if not self._drawn:
            return logits.argmax(dim=-1).tolist()
        assert self._params is not None
        own, at = [samples[i] for i in self._drawn], [steps[i] for i in self._drawn]
        part = logits if self._rows is None else logits[self._rows]
        for row, sample, place in zip(part, own, self._drawn, strict=True):
            if sample.constraint is not None:
                self._constrain(row, sample.constraint, place)
        tokens = next_tokens(
            part,
            self._params,
            steps=torch.tensor(at, device=self.device),
            history=self._history,
            banned=self._banned(own, at),
        )
        if self._history is not None:
            self._history.observe(tokens)
        if self._rows is None:
            return tokens.tolist()
        found = logits.argmax(dim=-1)
        found[self._rows] = tokens
        return found.tolist()

    def _constrain(self, row: Tensor, constraint: Constraint, place: int) -> None:
        try:
            constraint.mask(row)
            if row.amax().item() == -math.inf:
                self.failures[place] = "the constraint on the answer allows no token here"
        except Exception as error:  # of a grammar that came with a request: its own failure, not the engine's
            self.failures[place] = f"the constraint on the answer failed: {error}"

    def _arrange(self, samples: Sequence[Sample]) -> None:
        self._drawn = [
            i for i, sample in enumerate(samples) if not sample.plain or sample.count < sample.params.min_new_tokens
        ]
        own = [samples[i] for i in self._drawn]
        self._rows = self._params = self._history = None
        if not own:
            return
        if len(own) < len(samples):
            self._rows = torch.tensor(self._drawn, device=self.device)
        self._params = RowParams.stack(
            [sample.params for sample in own], vocab_size=self.vocab_size, device=self.device
        )
        if self._params.needs_history:
            self._history = self._remember(own)

    def _remember(self, samples: Sequence[Sample]) -> History:
        seen = torch.zeros(len(samples), self.vocab_size, dtype=torch.bool)
        counts = torch.zeros(len(samples), self.vocab_size, dtype=torch.int32)
        for row, sample in enumerate(samples):
            if sample.params.needs_history:
                seen[row, torch.tensor(sample.sequence.tokens)] = True
                if said := sample.generated:
                    counts[row] = torch.bincount(torch.tensor(said), minlength=self.vocab_size)
        return History(counts=counts.to(self.device), seen=seen.to(self.device))

    def _banned(self, samples: Sequence[Sample], steps: Sequence[int]) -> Tensor | None:
        """(R, V) bool: the ids that would end a text before its minimum; None if all are past theirs."""
        early = [i for i, (s, step) in enumerate(zip(samples, steps, strict=True)) if step < s.params.min_new_tokens]
        if not early:
            return None
        banned = torch.zeros(len(samples), self.vocab_size, dtype=torch.bool)
        for row in early:
            ends = stop_ids(samples[row].params, eos_ids=self.eos_ids)
            banned[row, [token for token in ends if token < self.vocab_size]] = True
        return banned.to(self.device)
