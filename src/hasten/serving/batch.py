"""One call of the model for a plan: the tokens of all its sequences end to end, and which rows are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.generation.paged import PagedCache, Rows
from hasten.model.transformer import Transformer
from hasten.serving.blocks import BlockManager
from hasten.serving.sequences import Scheduled, StepPlan


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """tokens: N of them, in the plan's order. wanted: rows to score. first: for each entry, the first row of its logits
    (its prompt's rows come before those of its last token).
    """

    tokens: list[int]
    wanted: list[int]
    first: list[int]
    rows: list[Rows]

    @classmethod
    def of(cls, plan: StepPlan, blocks: BlockManager, prompt_rows: Callable[[Scheduled], int] | None) -> ScheduledBatch:
        """prompt_rows: how many of an entry's rows score the prompt itself; None where nobody wants that."""
        tokens: list[int] = []
        wanted: list[int] = []
        first: list[int] = []
        rows: list[Rows] = []
        for entry in plan.entries:
            sequence, start, count = entry.sequence, entry.start, entry.count
            drafts, at = sequence.drafts, len(tokens)
            if count == 1 and not drafts:
                tokens.append(sequence.tokens[start])
            else:
                tokens += (sequence.tokens + drafts if drafts else sequence.tokens)[start : start + count]
            first.append(len(wanted))
            if prompt_rows is not None:
                wanted += range(at, at + prompt_rows(entry))
            if entry.complete:
                wanted += range(len(tokens) - 1 - len(drafts), len(tokens))
            rows.append(Rows(blocks.table(sequence.number), start, count))
        return cls(tokens, wanted, first, rows)

    def logits(self, model: Transformer, cache: PagedCache) -> Tensor:
        """Scores (R, V) float32 of the wanted rows (of the last one, if none is: the step only reads)."""
        step = cache.step(self.rows)
        tokens = torch.tensor([self.tokens], device=model.device)  # (1, N)
        wanted = torch.tensor(self.wanted or [len(self.tokens) - 1], device=model.device)
        return model(tokens, step.positions, step, rows=wanted)
