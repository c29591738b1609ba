"""Where a parameter of ours is in the tensors of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class RowSlice(NamedTuple):
    """Output rows of a fused matrix: start to stop in each of `groups` equal parts of it."""

    start: int
    stop: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where one of our tensors is in a checkpoint: the whole tensor `name`, or some rows of it.

    transposed: stored (in, out), as GPT-2's Conv1D does. expert: which one of a stacked (E, …) tensor.
    """

    name: str
    rows: RowSlice | None = None
    transposed: bool = False
    expert: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Slice the stored tensor: a view, except for rows of several groups."""
        if self.expert is not None:
            tensor = tensor[self.expert]
        if self.transposed:
            tensor = tensor.t()
        if self.rows is not None:
            start, stop, groups = self.rows
            tensor = tensor.unflatten(0, (groups, -1))[:, start:stop].flatten(0, 1)  # (g, R, …) -> (g·r, …)
            # Rows far apart are slow to multiply with.
            tensor = tensor.contiguous() if groups > 1 else tensor
        return tensor


@dataclass(frozen=True, slots=True)
class Stacks:
    """Tensors that hold a weight of all E experts of a layer, by the names of what they hold; biases end in "_bias".

    gate_up (E, 2·I, C): rows of gate, then of up, or of both in turn (alternating); of up alone, (E, I, C), where gated
    is False. down (E, C, I). transposed: each expert's matrix is (in, out).
    """

    gate_up: str
    down: str
    alternating: bool = False
    transposed: bool = False
    gated: bool = True

    def place(self, prefix: str, module: str, leaf: str, *, expert: int, size: int) -> TensorSlice:
        """The place of weight or bias of an expert's gate, up or down, which has `size` inner features."""
        name = prefix + (self.down if module == "down" else self.gate_up) + ("_bias" if leaf == "bias" else "")
        number = {"gate": 0, "up": 1}.get(module) if self.gated else None
        rows = None if number is None else RowSlice(number * size, (number + 1) * size)
        if number is not None and self.alternating:
            rows = RowSlice(number, number + 1, groups=size)
        return TensorSlice(name, rows, transposed=self.transposed and leaf == "weight", expert=expert)


def join(pieces: Sequence[TensorSlice], tensors: Sequence[Tensor]) -> Tensor:
    """Assemble the published tensor from its pieces (a transposed tensor is not transposed back)."""
    if pieces[0].expert is not None:
        stacked: dict[int, list[tuple[TensorSlice, Tensor]]] = {}
        for piece, tensor in zip(pieces, tensors, strict=True):
            stacked.setdefault(piece.expert or 0, []).append((replace(piece, expert=None), tensor))
        return torch.stack([join(*zip(*stacked[number], strict=True)) for number in sorted(stacked)])
    parts = [(piece.rows, tensor) for piece, tensor in zip(pieces, tensors, strict=True) if piece.rows is not None]
    if not parts:
        return tensors[0]
    ordered = sorted(parts, key=lambda part: part[0])
    return torch.cat([tensor.unflatten(0, (rows.groups, -1)) for rows, tensor in ordered], dim=1).flatten(0, 1)
