"""What a call of attention has besides q, k and v: what hides keys, what is added to the scores, and dropout."""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.spec import AttentionSpec


class Documents(NamedTuple):
    """Documents packed into one row: document i has the queries queries[i] … queries[i+1]-1, and keys likewise.

    Both are integer tensors (documents + 1,) that start with 0, as FlashAttention's `cu_seqlens`. Within a document
    the queries are the last of its keys.
    """

    queries: Tensor
    keys: Tensor


class Intervals(NamedTuple):
    """The first and the last key that a query sees at most, int32 (B, T) both, as positions in its row; (B, 1) both
    where they are the same for all queries of a row."""

    low: Tensor
    high: Tensor

    def dense(self, keys: int) -> Tensor:
        """bool (B, T or 1, S), for kernels that take nothing smaller."""
        places = torch.arange(keys, device=self.low.device)
        return (places >= self.low.unsqueeze(-1)) & (places <= self.high.unsqueeze(-1))

    @classmethod
    def of_padding(cls, given: Tensor) -> Self | None:
        """Of lengths (B,), or of a key-padding mask (B, S) whose rows have one stretch of keys each.

        None for a mask with gaps, and for one that cannot be read here: a device would wait for it, a graph break.
        """
        if given.dim() == 1:
            return cls(torch.zeros_like(given, dtype=torch.int32)[:, None], given.int()[:, None] - 1)
        if given.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        begins = F.pad(given, (1, 0))  # a key that was not there before
        if ((begins[:, 1:] > begins[:, :-1]).sum(1) > 1).any():
            return None
        low = given.int().argmax(1, keepdim=True) if given.shape[1] else given.sum(1, keepdim=True)
        return cls(low.int(), (low + given.sum(1, keepdim=True)).int() - 1)


class AttentionInputs(NamedTuple):
    """Every kernel is called as run(q, k, v, spec, inputs); the picker has made sure that it serves what is set here.

    mask: bool (T, S), (B, T, S), or of each head (B, H, T, S), True where a query sees a key; it replaces causality, as
    a block mask does. intervals hide further keys. key_padding: bool (B, S), True for keys that exist, where no
    intervals say it. bias: (…, T, S), added to the scores; alibi: slopes (H,). dropout: probability.
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


def document_intervals(documents: Tensor, window: int | None = None) -> Intervals:
    """Causal attention inside documents: documents int64 (B, T), the same number from a document's begin to its end."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.zeros_like(documents)
    begins[:, 1:] = places[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    low = begins.cummax(dim=1).values
    if window is not None:
        low = torch.maximum(low, places - window + 1)
    return Intervals(low.int(), places.int().contiguous())


def per_document(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs
) -> Tensor:
    """`run` on every document of q (1, N, H, D) and k, v (1, M, Hkv, D). Reads the lengths (a device waits for it)."""
    assert inputs.documents is not None
    starts, key_starts = (x.tolist() for x in inputs.documents)
    inputs = inputs._replace(documents=None)
    parts = []
    for i in range(len(starts) - 1):
        own, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        if own.stop == own.start:
            continue
        if keys.stop == keys.start:
            parts.append(q[:, own] * 0)  # queries without any key
            continue
        parts.append(run(q[:, own], k[:, keys], v[:, keys], spec, inputs))
    return torch.cat(parts, dim=1) if parts else q * 0
