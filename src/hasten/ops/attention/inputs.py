"""Arguments of an attention call besides q, k and v: masks, score biases, dropout."""

import functools
import math
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
    """The first and last key that each query may see: int32 (B, T) positions in its row.

    (B, 1) if they are the same for all queries of a row.
    """

    low: Tensor
    high: Tensor

    def dense(self, keys: int) -> Tensor:
        """bool (B, T or 1, S), for kernels that take nothing smaller."""
        places = torch.arange(keys, device=self.low.device)
        return (places >= self.low.unsqueeze(-1)) & (places <= self.high.unsqueeze(-1))

    @classmethod
    def of_padding(cls, given: Tensor) -> Self | None:
        """Intervals from lengths (B,), or from a key-padding mask (B, S) in which the keys of each row are contiguous.

        None for a mask with gaps, and for one that must not be read here: on a device that would synchronize, and in a
        compiled graph it would break the graph.
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
    """The `inputs` of a kernel, which is called as run(q, k, v, spec, inputs) and supports everything that is set here.

    mask: bool (T, S), (B, T, S), or of each head (B, H, T, S), True where a query sees a key; it replaces causality, as
    a block mask does. intervals hide further keys. key_padding: bool (B, S), True for keys that exist, where no
    intervals say it. bias: (…, T, S), added to the scores; alibi: slopes (H,). sinks (H,): a logit of each head that
    joins the softmax and has no value. dropout: probability.
    """

    mask: Tensor | None = None
    intervals: Intervals | None = None
    block_mask: BlockMask | None = None
    documents: Documents | None = None
    key_padding: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def only_a_mask(self) -> bool:
        """Whether nothing but a mask and dropout is set."""
        others = (self.intervals, self.block_mask, self.documents, self.key_padding, self.bias, self.alibi, self.sinks)
        return all(x is None for x in others)

    @property
    def hides_keys(self) -> bool:
        """Whether anything besides causality hides keys, so that a query may see none."""
        given = (self.mask, self.intervals, self.block_mask, self.documents, self.key_padding)
        return any(x is not None for x in given)

    def intervals_of(self, queries: int, keys: int, device: torch.device) -> Intervals | None:
        """The intervals, with the block mask's window included."""
        if self.block_mask is None or (window := self.block_mask.window) is None:
            return self.intervals
        high = torch.arange(keys - queries, keys, dtype=torch.int32, device=device)[None]  # (1, T)
        low = (high - window + 1).clamp(min=0)
        if self.intervals is None:
            return Intervals(low, high)
        return Intervals(torch.maximum(low, self.intervals.low), torch.minimum(high, self.intervals.high))


PLAIN = AttentionInputs()  # causality and the window alone


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to autocast's dtype, as PyTorch's attention does."""
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


def document_bounds(documents: Documents, queries: int, spec: AttentionSpec) -> Intervals:
    """The first and the last key that every query of packed documents sees."""
    ends = documents.queries[1:].long()
    places = torch.arange(queries)
    of = torch.searchsorted(ends, places, right=True)  # (T,) document numbers
    starts, key_ends = documents.keys.long()[of], documents.keys.long()[of + 1]
    low, high = starts, key_ends - 1
    if spec.causal:
        high = high - (ends[of] - 1 - places)  # the last query of a document sees its last key
        if spec.window is not None:
            low = torch.maximum(low, high - spec.window + 1)
    return Intervals(low.int()[None], high.int()[None])


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


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None = None) -> Tensor:
    """Causal visibility, optionally limited to the last `window` keys, the query's own included.

    query_positions (..., T) and key_positions (..., S) are positions in the sequence; returns bool (..., T, S).
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)  # (..., T, S)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def causal(queries: int, keys: int, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """The mask (T, S) of `queries` that are the last ones of `keys` positions: aligned bottom right."""
    return visible(torch.arange(keys - queries, keys, device=device), torch.arange(keys, device=device), window)


def positions(
    queries: int, keys: int, documents: Documents | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Positions (T,) of the queries and (S,) of the keys within their sequence, and which pairs (T, S) share one.

    The last query of every document is at the position of its last key. The third is None without documents.
    """
    key_places = torch.arange(keys, device=device)
    if documents is None:
        return torch.arange(keys - queries, keys, device=device), key_places, None
    query_places = torch.arange(queries, device=device)
    of_query = torch.searchsorted(documents.queries[1:].long(), query_places, right=True)  # (T,) document numbers
    of_key = torch.searchsorted(documents.keys[1:].long(), key_places, right=True)
    # Counted from the end of the document, which both share.
    query_places = query_places - documents.queries[1:].long()[of_query]
    return query_places, key_places - documents.keys[1:].long()[of_key], of_query[:, None] == of_key


def visibility(
    queries: int, keys: int, spec: AttentionSpec, inputs: AttentionInputs, device: torch.device
) -> Tensor | None:
    """Combine everything that hides keys into one mask (broadcasts to (B, H, T, S)); None if nothing is hidden."""
    mask, parts = inputs.mask, []
    if mask is not None:
        parts.append(mask.unsqueeze(1) if mask.dim() == 3 else mask)  # (T, S), (B, 1, T, S), or (B, H, T, S)
    elif inputs.block_mask is not None:
        parts.append(inputs.block_mask.dense(queries, keys, device))  # (1 or H, T, S)
    causal = spec.causal and not parts
    if causal or inputs.documents is not None:
        query_places, key_places, together = positions(queries, keys, inputs.documents, device)
        if causal:
            parts.append(visible(query_places, key_places, spec.window))
        if together is not None:
            parts.append(together)
    if inputs.intervals is not None:
        parts.append(inputs.intervals.dense(keys).unsqueeze(1))  # (B, 1, T or 1, S)
    if inputs.key_padding is not None:
        parts.append(inputs.key_padding[:, None, None])  # (B, 1, 1, S)
    return functools.reduce(torch.logical_and, parts) if parts else None


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """ALiBi's slopes (H,) in float32: a geometric series from 2^(-8/H) on (arXiv 2108.12409).

    Where H is no power of two, those of the next lower one, and then every other one of twice as many, as published.
    """
    whole = 1 << (heads.bit_length() - 1)
    steps = [-8 * (i + 1) / whole for i in range(whole)] + [-4 * (2 * i + 1) / whole for i in range(heads - whole)]
    return torch.tensor([math.pow(2, step) for step in steps], dtype=torch.float32, device=device)


def alibi_bias(slopes: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """-slope · distance, (H, T, S): what ALiBi adds to the scores."""
    distance = (query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)).abs()
    return -slopes[:, None, None] * distance


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Let sinks (H,) join the softmax of attention out (B, T, H, D), whose log-sum-exp over the keys is (B, H, T).

    A logit without a value only makes the sum larger by which all are divided: softmax([s, sink]) is
    softmax(s)·σ(lse - sink) for the scores s.
    """
    if sinks is None:
        return out
    kept = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).transpose(1, 2)  # (B, T, H)
    return (out * kept.unsqueeze(-1)).to(out.dtype)
