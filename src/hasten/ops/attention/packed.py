"""Packed documents for kernels that know none: each document is a call of its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.ops.attention.request import Documents


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
