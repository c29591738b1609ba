"""Sequences of a step in groups with equally many tokens, which are computed together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceGroup(NamedTuple):
    """n sequences with L tokens each.

    rows: int64 (n, L), which of the step's tokens; None: all of them, in order. slots: where the states of the
    sequences are kept. fresh: nothing came before these tokens, so that no state is there. certain: after how many
    tokens a state is kept, later ones being guesses; None: after all.
    """

    size: int
    rows: Tensor | None = None
    slots: Tensor | slice = slice(0)
    fresh: bool = True
    certain: int | None = None


def group_sequences(
    first: Sequence[int],
    counts: Sequence[int],
    *,
    tokens: int,
    device: torch.device,
    starts: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    certain: Sequence[int] | None = None,
) -> list[SequenceGroup]:
    """Group the sequences of a step of `tokens` tokens.

    first, counts: each sequence's first row in the step and its number of tokens there; with 0 it is left out. starts:
    tokens that came before in earlier steps; None: none of any. slots: where their states are. certain: tokens of
    each that are no guesses; None: all.
    """
    found: dict[tuple[int, bool, int], list[int]] = {}
    for number, count in enumerate(counts):
        if count:
            fresh, sure = starts is None or starts[number] == 0, count if certain is None else certain[number]
            found.setdefault((count, fresh, sure), []).append(number)
    groups = []
    for (count, fresh, sure), members in found.items():
        begins = [first[number] for number in members]
        rows = None
        if len(members) * count != tokens or begins != list(range(0, tokens, count)):
            rows = torch.tensor(begins, device=device)[:, None] + torch.arange(count, device=device)
        place = slice(0) if slots is None else _places([slots[number] for number in members], device)
        groups.append(SequenceGroup(len(members), rows, place, fresh, sure))
    return groups


def _places(slots: list[int], device: torch.device) -> Tensor | slice:
    """Slots as an index; those in a row as a slice, of which tensors are views."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


def in_groups(groups: Sequence[SequenceGroup], run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """run(group, *inputs (n, L, …)) -> (n, L, …) for each group; together (B, T, …), from inputs (B, T, …).

    Rows of no group are zero.
    """
    shape = inputs[0].shape[:2]
    flat = [x.flatten(0, 1) for x in inputs]  # (B·T, …)
    together: Tensor | None = None
    for group in groups:
        if group.rows is None:
            own = run(group, *(x.unflatten(0, (group.size, -1)) for x in flat))
            return own.flatten(0, 1).unflatten(0, shape)
        own = run(group, *(x[group.rows] for x in flat))
        if together is None:
            together = own.new_zeros(shape.numel(), *own.shape[2:])
        together[group.rows.flatten()] = own.flatten(0, 1)
    assert together is not None, "a step has tokens"
    return together.unflatten(0, shape)
