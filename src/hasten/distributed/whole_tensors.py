"""What an optimizer that updates parts of tensors needs of the whole ones: their shapes, norms and matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Parts:
    """Access to whole tensors for an optimizer that updates parts of them. In this base class the parts are whole."""

    def shape(self, part: Tensor) -> torch.Size:
        """Shape of the whole tensor."""
        return part.shape

    def divided(self, part: Tensor) -> bool:
        """Whether other ranks have the rest of the tensor."""
        return False

    def norms(self, parts: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
        """Norms (N,) of whole tensors, from this rank's parts. of: the optimizer's parameter for each part."""
        return torch.stack(torch._foreach_norm(list(parts)))

    def whole(self, parts: Tensor, like: Tensor) -> Tensor:
        """Gather whole matrices of one shape: (N, own rows, columns) -> (N, rows, columns).

        like: the optimizer's parameter of one of them.
        """
        return parts

    def part(self, matrices: Tensor, like: Tensor) -> Tensor:
        """Take this rank's rows of whole matrices: the inverse of `whole`."""
        return matrices
