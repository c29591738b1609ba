"""Calls of the model: the tokens of a step's sequences end to end, and the states of one text for its embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.generation.paged import PagedCache, Rows
from hasten.generation.prompts import check_ids
from hasten.model.context import training_context
from hasten.model.transformer import Transformer
from hasten.serving.blocks import BlockManager
from hasten.serving.request import RequestRefused
from hasten.serving.scheduler import ScheduledTokens, StepPlan


def step_logits(
    model: Transformer,
    cache: PagedCache,
    plan: StepPlan,
    blocks: BlockManager,
    *,
    prompt_rows: Callable[[ScheduledTokens], int] | None,
) -> tuple[Tensor, list[int]]:
    """Logits (R, V) float32 of the rows that are wanted, and the first of each of the plan's entries.

    prompt_rows: how many of an entry's tokens predict one of its prompt, None where nobody wants that; their rows come
    before those of its last token. Where none is wanted, the step only reads, and R is 1.
    """
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
        rows.append(Rows(blocks.block_table(sequence.number), start, count))
    step = cache.step(rows)
    ids = torch.tensor([tokens], device=model.device)  # (1, N)
    return model(ids, step.positions, step, rows=torch.tensor(wanted or [len(tokens) - 1], device=model.device)), first


@torch.no_grad()
def embed(model: Transformer, prompt: Sequence[int], *, pooling: str, max_length: int) -> Tensor:
    """States (C,) float32: the mean over the prompt's tokens ("mean"), or the last one's ("last"). Not normalised.

    Raises RequestRefused.
    """
    if pooling not in ("mean", "last"):
        raise RequestRefused(f"pooling is {pooling!r:.40}; it must be 'mean' or 'last'")
    try:
        check_ids(model, prompt)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    if not 0 < len(prompt) <= max_length:
        raise RequestRefused(f"the text has {len(prompt)} tokens; it must have from 1 to {max_length}")
    tokens = torch.tensor([list(prompt)], device=model.device)  # (1, T)
    positions = torch.arange(len(prompt), device=tokens.device)[None]
    x = model.norm(model.states(tokens, positions, training_context(model, len(prompt)))).float()[0]  # (T, C)
    return x[-1] if pooling == "last" else x.mean(dim=0)
