"""Attention of a step in which every sequence has its own number of new tokens, over keys and values in blocks.

Prefill chunks and decodes share one ragged batch: q (N, H, D), tokens query_start_loc[b] … query_start_loc[b+1] - 1 of
which are the last of sequence b's seq_lens[b] positions (`AttentionMetadata`). Kernels are called as run(q, view, *,
spec, groups, dense, sinks): `groups()` says where the keys of sequences with the same number of new tokens are; `dense`
is the layer's own attention, for kernels that first copy keys into one tensor; the others read through the block table.
sinks (H,): a logit of each head that joins the softmax, or None.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.ops import triton_support
from hasten.ops.attention.cache_rows import SCALE_BYTES, turn
from hasten.ops.attention.inputs import visible
from hasten.ops.attention.spec import HALVES, LARGEST_NATIVE, AttentionRequest, AttentionSpec
from hasten.ops.attention.view import KVView
from hasten.ops.native import missing_library, native_ops
from hasten.ops.picker import Kernel


class PagedGroup(NamedTuple):
    """Sequences with T new tokens each, n·T of the step's rows: where their keys lie, and what each query sees.

    rows int64 (n·T,) of q; slots int64 (n, S) of the cache, -1 past a sequence's end; positions int64 (n, T). A single
    sequence has no slots past its end, and its queries are the last of its keys, as every kernel takes them. mask, of a
    sparse pattern: bool (n, T, S) or (n, H, T, S), causality included.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    mask: Tensor | None = None


def groups_of(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray, block_size: int
) -> list[PagedGroup]:
    """All decodes as one group, and each chunk of a prompt as one; arguments as in AttentionMetadata, on the host."""
    counts = np.diff(query_start_loc)
    chunks = [np.array([b]) for b in np.flatnonzero(counts > 1)]
    decodes = np.flatnonzero(counts == 1)
    found = []
    for members in ([decodes] if len(decodes) else []) + chunks:
        count, longest = int(counts[members[0]]), int(seq_lens[members].max())
        places = np.arange(longest)
        slots = block_table[members[:, None], places // block_size] * block_size + places % block_size  # (n, S)
        slots[places >= seq_lens[members, None]] = -1
        rows = (query_start_loc[members, None] + np.arange(count)).reshape(-1)
        positions = seq_lens[members, None] - count + np.arange(count)
        found.append(PagedGroup(*map(torch.from_numpy, (rows, slots, positions))))
    return found


def gathered(
    q: Tensor,
    view: KVView,
    *,
    spec: AttentionSpec,
    groups: Callable[[], Sequence[PagedGroup]],
    sinks: Tensor | None = None,
    dense: Callable[..., Tensor],
) -> Tensor:
    """The reference: keys and values brought side by side, then plain attention of equally long rows."""
    out = torch.empty_like(q)
    for rows, slots, positions, mask in groups():
        keys = view.metadata.rows.read(view.k[slots], spec.head_dim, q.dtype)
        values = keys if view.v is view.k else view.metadata.rows.read(view.v[slots], spec.head_dim, q.dtype)
        queries = q[rows].unflatten(0, positions.shape)  # (n, T, H, D)
        # The dense kernel of a whole prompt needs no mask; that of one query is slower than with one.
        if mask is None and (len(slots) > 1 or positions.shape[1] == 1):
            mask = visible(positions, torch.arange(slots.shape[1], device=q.device), spec.window)  # (n, T, S)
        out[rows] = dense(queries, keys, values, mask=mask, sinks=sinks).flatten(0, 1)
    return out


def native(q: Tensor, view: KVView, *, spec: AttentionSpec, sinks: Tensor | None = None, **unused: object) -> Tensor:
    """The CPU's kernel: the same bits for a query in any company."""
    read = (view.k, view.v, *view.metadata.to_read)
    scores, own = (spec.scale, spec.window or 0, spec.softcap or 0.0), None if sinks is None else sinks.float()
    return native_ops().attention(q, *read, *scores, view.seen, own)


def triton(q: Tensor, view: KVView, *, spec: AttentionSpec, **unused: object) -> Tensor:
    """CUDA's kernel: prompts, their pieces and decodes in one launch."""
    # Imported here, because it imports Triton: only where the kernel is taken.
    from hasten.ops.attention.ragged import over_view

    if not view.metadata.rows.rotated:
        return over_view(q, view, spec=spec)
    return turn(over_view(turn(q.float()).to(q.dtype), view, spec=spec).float()).to(q.dtype)


def _native_unsupported(request: AttentionRequest) -> str | None:
    if request.device.type != "cpu":
        return f"it needs a CPU; the cache is on {request.device}"
    return request.outside(torch.bfloat16, largest=LARGEST_NATIVE) or missing_library()


def _triton_unsupported(request: AttentionRequest) -> str | None:
    if (reason := request.outside(*HALVES)) is not None:
        return reason
    if request.block_mask:
        return "it knows no sparse pattern"
    if request.sinks:
        return "it knows no attention sinks"
    if request.cache_bits == 4:
        return f"it reads caches in {request.dtype_name} and int8, not int4"
    if request.cache_bits == 8 and request.spec.head_dim % SCALE_BYTES:
        return f"the head size is {request.spec.head_dim}; over an int8 cache it must be a multiple of {SCALE_BYTES}"
    return triton_support.refusal(request.device, request.compute_capability)


PAGED_KERNELS: tuple[Kernel[AttentionRequest], ...] = (
    Kernel("triton", triton, _triton_unsupported),
    Kernel("native", native, _native_unsupported),
    Kernel("gathered", gathered, lambda request: None),
)
