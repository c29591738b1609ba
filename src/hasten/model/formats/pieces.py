"""Taking our tensors out of a published one, and putting them together again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.model.families.family import TensorSlice


def take(tensor: Tensor, piece: TensorSlice) -> Tensor:
    """The part of a stored tensor that a piece names: a view, except for rows of several groups."""
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    if piece.transposed:
        tensor = tensor.t()
    if piece.rows is not None:
        start, stop, groups = piece.rows
        tensor = tensor.unflatten(0, (groups, -1))[:, start:stop].flatten(0, 1)  # (g, R, …) -> (g·r, …)
    return tensor


def join(pieces: Sequence[TensorSlice], tensors: Sequence[Tensor]) -> Tensor:
    """The published tensor that the pieces were taken from (rows only: not turned back where it is transposed)."""
    parts = [(piece.rows, tensor) for piece, tensor in zip(pieces, tensors, strict=True) if piece.rows is not None]
    if not parts:
        return tensors[0]
    ordered = sorted(parts, key=lambda part: part[0])
    return torch.cat([tensor.unflatten(0, (rows.groups, -1)) for rows, tensor in ordered], dim=1).flatten(0, 1)
