"""What a call of attention has besides q, k and v: what hides keys, what is added to the scores, and dropout."""

from typing import NamedTuple

import torch
from torch import Tensor

from hasten.ops.attention.block_mask import BlockMask


class Documents(NamedTuple):
    """Documents packed into one row: document i has the queries queries[i] … queries[i+1]-1, and keys likewise.

    Both are integer tensors (documents + 1,) that start with 0, as FlashAttention's `cu_seqlens`. Within a document
    the queries are the last of its keys.
    """

    queries: Tensor
    keys: Tensor


class Intervals(NamedTuple):
    """The first and the last key that each query sees, int32 (B, T) both, as positions in its row."""

    low: Tensor
    high: Tensor

    def dense(self, keys: int) -> Tensor:
        """bool (B, T, S), for kernels that take nothing smaller."""
        places = torch.arange(keys, device=self.low.device)
        return (places >= self.low.unsqueeze(-1)) & (places <= self.high.unsqueeze(-1))


class AttentionInputs(NamedTuple):
    """Every kernel is called as run(q, k, v, spec, inputs); the picker has made sure that it serves what is set here.

    mask: bool (T, S), (B, T, S), or of each head (B, H, T, S), True where a query sees a key; it replaces causality, as
    intervals and a block mask do. key_padding: bool (B, S), True for keys that exist. bias: (…, T, S), added to the
    scores; alibi: slopes (H,). dropout: probability.
    """

    mask: Tensor | None = None
    intervals: Intervals | None = None
    block_mask: BlockMask | None = None
    documents: Documents | None = None
    key_padding: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    dropout: float = 0.0

    @property
    def only_a_mask(self) -> bool:
        """Nothing is given but a mask and dropout, or not even these."""
        others = (self.intervals, self.block_mask, self.documents, self.key_padding, self.bias, self.alibi)
        return all(x is None for x in others)

    @property
    def hides_keys(self) -> bool:
        """By something else than causality, so that a query may see none at all."""
        given = (self.mask, self.intervals, self.block_mask, self.documents, self.key_padding)
        return any(x is not None for x in given)


PLAIN = AttentionInputs()  # causality and the window alone


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In autocast's dtype, as PyTorch's own attention takes them."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    half = torch.get_autocast_dtype(q.device.type)
    return q.to(half), k.to(half), v.to(half)
