"""Packed documents: an interval of keys for every query, and documents one by one for kernels that know neither."""

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.ops.attention.inputs import AttentionInputs, Intervals
from hasten.ops.attention.spec import AttentionSpec


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
