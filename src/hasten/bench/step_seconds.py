"""Whole steps of a model over its cache, timed: what predictions of its speed are made of."""

import time
from collections.abc import Collection
from statistics import median

import torch

from hasten.engine.given_texts import GivenTexts
from hasten.model.sharded import broadcast_from_rank0
from hasten.ops.draw import likeliest


@torch.inference_mode()
def step_seconds(texts: GivenTexts, rows: Collection[int], context: int, *, seconds: float = 0.3) -> dict[int, float]:
    """Median seconds of a step over each number of rows, after `context` tokens of one sequence.

    A shorter text gets a prompt of that length first; afterwards it has `context` tokens. Row counts take turns for
    about `seconds` in all, each at least once; of two steps in a row the second one counts, since steps usually follow
    others of their size.
    """
    device = texts.model.device
    token = torch.tensor([1], device=device)
    if texts.lengths[0] < context:
        texts.truncate(0)
        texts.prefill([[1] * context])
    rewind(texts, context)
    times: dict[int, list[float]] = {count: [] for count in sorted(rows)}
    begun = time.perf_counter()
    while True:
        for count, own in times.items():
            for _ in range(2):
                start = time.perf_counter()
                logits = texts.decode(token) if count == 1 else texts.verify([[1] * count])
                likeliest(logits).tolist()
                took = time.perf_counter() - start
                rewind(texts, context)
            own.append(took)
        # The first of several ranks decides for all of them, whose steps wait for each other.
        if broadcast_from_rank0(texts.model, [[time.perf_counter() - begun >= seconds]])[0][0]:
            return {count: median(own) for count, own in times.items()}


def rewind(texts: GivenTexts, length: int) -> None:
    """Have the texts go on after `length` tokens; of states, from which nothing can be taken back, any will do."""
    if texts.model.config.keeps_states:
        texts.suppose(length)
    else:
        texts.truncate(length)
