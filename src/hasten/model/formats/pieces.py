"""Taking our tensors out of a published one, and putting them together again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.model.families.family import TensorSlice


def take(tensor: Tensor, piece: TensorSlice) -> Tensor:
    """The part of a stored tensor that a piece names: a view, except for interleaved rows."""
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    if piece.transposed:
        tensor = tensor.t()
    if piece.start is not None:
        tensor = tensor[piece.start : piece.stop]
    if piece.interleaved is not None:
        count, part, size = piece.interleaved
        tensor = tensor.unflatten(0, (-1, count, size))[:, part].flatten(0, 1)  # (H, n, D, …) -> (H·D, …)
    return tensor


def join(pieces: Sequence[TensorSlice], tensors: Sequence[Tensor]) -> Tensor:
    """The published tensor that the pieces were taken from (rows only: not turned back where it is transposed)."""
    first = pieces[0]
    if first.interleaved is not None:
        size = first.interleaved[2]
        return torch.stack([t.unflatten(0, (-1, size)) for t in tensors], dim=1).flatten(0, 2)
    if first.start is not None:
        order = sorted(range(len(tensors)), key=lambda i: pieces[i].start or 0)
        return torch.cat([tensors[i] for i in order])
    return tensors[0]
