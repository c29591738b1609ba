"""Packed documents: an interval of keys for every query, and documents one by one for kernels that know neither."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.ops.attention.request import Documents


class Intervals(NamedTuple):
    """The first and the last key that each query sees, int32 (B, T) both, as positions in its row."""

    low: Tensor
    high: Tensor

    def mask(self, keys: int) -> Tensor:
        """bool (B, T, S), for kernels that take nothing smaller."""
        places = torch.arange(keys, device=self.low.device)
        return (places >= self.low.unsqueeze(-1)) & (places <= self.high.unsqueeze(-1))


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
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, documents: Documents, **options: object
) -> Tensor:
    """`run` on every document of q (1, N, H, D) and k, v (1, M, Hkv, D). Reads the lengths (a device waits for it)."""
    starts, key_starts = documents.queries.tolist(), documents.keys.tolist()
    parts = []
    for i in range(len(starts) - 1):
        own, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        if own.stop == own.start:
            continue
        if keys.stop == keys.start:
            parts.append(q[:, own] * 0)  # queries without any key
            continue
        parts.append(run(q[:, own], k[:, keys], v[:, keys], **options))
    return torch.cat(parts, dim=1) if parts else q * 0
