"""Cutting attention into chunks of queries, each with the keys that it can see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hasten.ops.attention.masks import alibi_bias, visible
from hasten.ops.attention.spec import AttentionSpec

# Bytes of a chunk's scores in float32: on a CPU they should stay in its caches, on a GPU launches should not count.
CPU_SCORES, OTHER_SCORES = 8 << 20, 256 << 20
FEWEST_ROWS = 128  # of a product: with fewer it is slower; fewer heads are taken at once instead

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries start … stop - 1 over keys first_key … last_key - 1 of some sequences and key heads.

    rows and keys index tensors (B, Hkv, G, T, …) and (B, Hkv, S, …).
    """

    number: int
    batch: slice
    heads: slice
    queries: slice
    seen: slice

    @property
    def rows(self) -> Index:
        return self.batch, self.heads, slice(None), self.queries

    @property
    def keys(self) -> Index:
        return self.batch, self.heads, self.seen


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The tensors with heads outside, q (B, Hkv, G, T, D) and k, v (B, Hkv, S, D), and what happens to scores.

    q and k are multiplied by `root` already, and their product still wants `rest`: root² · rest = scale.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    root: float
    rest: float
    mask: Tensor | None
    key_padding: Tensor | None
    bias: Tensor | None
    alibi: Tensor | None
    low: Tensor | None
    high: Tensor | None

    @classmethod
    def of(cls, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Self:
        """From q, k, v (B, T, H, D), in the order that the products want; keys and values are never repeated.

        others: mask, key_padding, bias, alibi and intervals (low, high) of the `AttentionInputs`.
        """
        # Half of the scale goes into each factor, so that the products cannot overflow in half precision; as a power of
        # two, so that nothing is rounded. What is left of it, 1 to 4, multiplies the scores in float32.
        root = 2.0 ** math.floor(math.log2(abs(spec.scale)) / 2) if spec.scale else 1.0
        if q.dtype == torch.float16 and q.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()  # CPUs rarely multiply float16; what does it for them is slower
        k, v = (k * root).transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        outside = (q * root).transpose(1, 2).unflatten(1, (spec.kv_heads, spec.groups))
        return cls(spec, outside, k, v, root, spec.scale / root**2, *others)

    @property
    def lse_dtype(self) -> torch.dtype:
        """Of scores and sums: float32, or float64 if the inputs are."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def wide(self, shape: torch.Size) -> Tensor:
        """Zeros in that dtype."""
        return torch.zeros(shape, dtype=self.lse_dtype, device=self.q.device)

    def chunks(self) -> Iterator[Chunk]:
        """All queries, in chunks whose scores fit that."""
        batch, kv_heads, groups, queries, _ = self.q.shape
        keys = self.k.shape[2]
        row_bytes = 4 * groups * keys  # the scores of one query of every head of a group
        fewest = min(queries, max(1, FEWEST_ROWS // groups))
        budget = CPU_SCORES if self.q.device.type == "cpu" else OTHER_SCORES
        at_once = max(1, budget // max(1, row_bytes * fewest))  # pairs of sequence and key head
        heads = min(kv_heads, at_once)
        sequences = max(1, min(batch, at_once // heads)) if heads == kv_heads else 1
        length = max(fewest, budget // max(1, row_bytes * heads * sequences))
        number = 0
        for b in range(0, batch, sequences):
            for h in range(0, kv_heads, heads):
                for start in range(0, queries, length):
                    stop = min(start + length, queries)
                    yield Chunk(
                        number,
                        slice(b, b + sequences),
                        slice(h, h + heads),
                        slice(start, stop),
                        self._seen(slice(b, b + sequences), start, stop),
                    )
                    number += 1

    def _seen(self, batch: slice, start: int, stop: int) -> slice:
        """The keys that some query of the chunk may see by causality, window and intervals; at least one."""
        keys, queries = self.k.shape[2], self.q.shape[3]
        first, last = 0, keys
        if self.mask is None and self.spec.causal:
            last = max(1, keys - queries + stop)
            if self.spec.window is not None:
                first = max(0, keys - queries + start - self.spec.window + 1)
        low, high = self.low, self.high
        if low is None or high is None or low.device.type != "cpu" or torch.compiler.is_compiling():
            return slice(min(last - 1, first), last)
        rows = slice(0, 1) if low.shape[1] == 1 else slice(start, stop)
        first, last = max(first, int(low[batch, rows].min())), max(1, min(last, int(high[batch, rows].max()) + 1))
        return slice(min(last - 1, first), last)

    def scores(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """A chunk's scores in float32, (B', Hkv', G, t, s), with -infinity for keys that are not seen.

        The second is what soft-capping multiplies their gradient by, or None.
        """
        scores = self.product(self.q[chunk.rows], self.k[chunk.keys].transpose(-1, -2)).to(self.lse_dtype)
        scores *= self.rest
        slope = None
        if self.spec.softcap is not None:
            scores.div_(self.spec.softcap).tanh_()
            slope = 1 - scores.square()
            scores *= self.spec.softcap
        if self.bias is not None:
            scores += self._of_bias(self.bias, chunk)
        offset = self.k.shape[2] - self.q.shape[3]  # the last query stands where the last key does
        places = torch.arange(chunk.queries.start + offset, chunk.queries.stop + offset, device=scores.device)
        key_places = torch.arange(chunk.seen.start, chunk.seen.stop, device=scores.device)
        if self.alibi is not None:
            slopes = self.alibi.to(scores.dtype).unflatten(0, (self.spec.kv_heads, self.spec.groups))[chunk.heads]
            scores += alibi_bias(slopes.flatten(), places, key_places).unflatten(0, slopes.shape)
        if self.mask is not None:
            own = (
                self.mask[chunk.queries] if self.mask.dim() == 2 else self.mask[chunk.batch, None, None, chunk.queries]
            )
            scores.masked_fill_(~_cut(own, -1, chunk.seen), float("-inf"))
        elif self.spec.causal:
            scores.masked_fill_(~visible(places, key_places, self.spec.window), float("-inf"))
        if self.low is not None and self.high is not None:
            low, high = (_cut(x[chunk.batch], 1, chunk.queries)[:, None, None, :, None] for x in (self.low, self.high))
            scores.masked_fill_((key_places < low) | (key_places > high), float("-inf"))
        if self.key_padding is not None:
            scores.masked_fill_(~self.key_padding[chunk.batch, None, None, None, chunk.seen], float("-inf"))
        return scores, slope

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a (B, Hkv, G, t, n) @ b (B, Hkv, n, m), the heads of a group as rows of one product, in q's dtype."""
        rows = a.to(self.q.dtype).flatten(2, 3)  # (B, Hkv, G·t, n)
        return (rows @ b.to(self.q.dtype)).unflatten(2, a.shape[2:4])

    def summed_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ over group and queries of a (B, Hkv, G, t, s)ᵀ b (B, Hkv, G, t, D): (B, Hkv, s, D)."""
        return a.to(self.q.dtype).flatten(2, 3).transpose(-1, -2) @ b.to(self.q.dtype).flatten(2, 3)

    def _of_bias(self, bias: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's part of bias (B or 1, H or 1, T or 1, S or 1), as (B', Hkv', G, t, s)."""
        part = _cut(bias, 3, chunk.seen)
        part = _cut(_cut(part, 2, chunk.queries), 0, chunk.batch)
        if bias.shape[1] == 1:
            return part.unsqueeze(2)
        return part.unflatten(1, (self.spec.kv_heads, self.spec.groups))[:, chunk.heads]

    def add_to_bias(self, d_bias: Tensor, d_scores: Tensor, chunk: Chunk) -> None:
        """Add a chunk's gradient to that of the bias, summed over what the bias is the same for."""
        part = self._of_bias(d_bias, chunk)  # a view
        over = [i for i in range(5) if part.shape[i] == 1 and d_scores.shape[i] != 1]
        part += d_scores.sum(over, keepdim=True) if over else d_scores

    def inside(self, x: Tensor) -> Tensor:
        """(B, T, H, D) -> (B, Hkv, G, T, D)."""
        return x.transpose(1, 2).unflatten(1, (self.spec.kv_heads, self.spec.groups))

    def outside(self, x: Tensor) -> Tensor:
        """(B, Hkv, G, T, D) or (B, Hkv, S, D) -> (B, T, H, D)."""
        return (x if x.dim() == 4 else x.flatten(1, 2)).transpose(1, 2)


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """x[part] in one dimension, or all of it where x is the same for every index."""
    return x if x.shape[dim] == 1 else x.narrow(dim, part.start, min(part.stop, x.shape[dim]) - part.start)
