"""Memory-efficient attention in plain tensor operations: any device, any option, memory linear in the length.

As in Rabe & Staats (arXiv 2112.05682) and xformers: the queries are taken in chunks, so that only a chunk's scores are
ever in memory, and only output and log-sum-exp of every query are kept. The backward pass computes the scores of each
chunk again from q, k and the log-sum-exp; as in FlashAttention the row term D = Σ dO·O replaces the softmax's own sum.

    for each chunk of queries:        P  = exp(scale·Q Kᵀ - lse)
        dV += Pᵀ dO                   dS = P · (dO Vᵀ - D)
        dQ  = scale·dS K              dK += scale·dSᵀ Q
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hasten.ops.attention.inputs import (
    PLAIN,
    AttentionInputs,
    alibi_bias,
    as_autocast,
    per_document,
    visible,
    with_sinks,
)
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
        """dtype of scores and sums: float32, or float64 if the inputs are float64."""
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
                    own, part = slice(b, b + sequences), slice(start, min(start + length, queries))
                    yield Chunk(number, own, slice(h, h + heads), part, self._seen(own, part))
                    number += 1

    def _seen(self, batch: slice, part: slice) -> slice:
        """The keys that some query of the chunk may see by causality, window and intervals; at least one."""
        keys, queries = self.k.shape[2], self.q.shape[3]
        first, last = 0, keys
        if self.mask is None and self.spec.causal:
            last = max(1, keys - queries + part.stop)
            if self.spec.window is not None:
                first = max(0, keys - queries + part.start - self.spec.window + 1)
        low, high = self.low, self.high
        if low is None or high is None or low.device.type != "cpu" or torch.compiler.is_compiling():
            return slice(min(last - 1, first), last)
        rows = slice(0, 1) if low.shape[1] == 1 else part
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
        offset = self.k.shape[2] - self.q.shape[3]  # the last query is at the position of the last key
        places = torch.arange(chunk.queries.start + offset, chunk.queries.stop + offset, device=scores.device)
        key_places = torch.arange(chunk.seen.start, chunk.seen.stop, device=scores.device)
        if self.alibi is not None:
            slopes = self.alibi.to(scores.dtype).unflatten(0, (self.spec.kv_heads, self.spec.groups))[chunk.heads]
            scores += alibi_bias(slopes.flatten(), places, key_places).unflatten(0, slopes.shape)
        if self.mask is not None:
            of_batch = () if self.mask.dim() == 2 else (chunk.batch, None, None)
            scores.masked_fill_(~_cut(self.mask[*of_batch, chunk.queries], -1, chunk.seen), float("-inf"))
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


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """x[part] in one dimension, or all of it where x is the same for every index."""
    return x if x.shape[dim] == 1 else x.narrow(dim, part.start, min(part.stop, x.shape[dim]) - part.start)


def chunked(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """Same contract as `reference`, in memory that grows with T + S instead of T·S. Gradients of first order only."""
    if inputs.documents is not None:
        return per_document(chunked, q, k, v, spec, inputs)
    if not k.shape[1]:
        return q * 0  # queries without any key
    q, k, v = as_autocast(q, k, v)  # inside, the precisions are chosen with care
    # One number from PyTorch's generator decides all of the dropout, so that the backward pass can repeat it.
    seed = int(torch.randint(1 << 62, ()).item()) if inputs.dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        low, high = inputs.intervals or (None, None)
        tensors = (inputs.mask, inputs.key_padding, inputs.bias, inputs.alibi, low, high)
        out, lse = _Chunked.apply(spec, inputs.dropout, seed, q, k, v, *tensors)
        return with_sinks(out, lse.flatten(1, 2), inputs.sinks)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: AttentionSpec, dropout: float, seed: int, q: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, H, D) and the log-sum-exp (B, Hkv, G, T)."""
        work = ChunkPlan.of(spec, q, *others)
        result = q.new_empty(q.shape)
        out, lse = work.inside(result), work.wide(work.q.shape[:-1])  # (B, Hkv, G, T, D), (B, Hkv, G, T)
        for chunk in work.chunks():
            scores, _ = work.scores(chunk)  # (B, Hkv, G, t, s)
            peak = scores.amax(-1, keepdim=True)
            peak.masked_fill_(peak == float("-inf"), 0)  # of a query that sees no key
            probabilities = scores.sub_(peak).exp_()
            total = probabilities.sum(-1, keepdim=True)
            # Normalised before the product with the values, which half precision could not hold otherwise.
            probabilities.div_(total.masked_fill(total == 0, 1))
            if dropout:
                probabilities.mul_(_kept(chunk, probabilities, dropout, seed))
            out[chunk.rows] = work.product(probabilities, work.v[chunk.keys])
            lse[chunk.rows] = total.log_().add_(peak).squeeze(-1)
        ctx.save_for_backward(result, lse, q, *others)
        ctx.spec, ctx.dropout, ctx.seed = spec, dropout, seed
        return result, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, lse, q, k, v, *others = ctx.saved_tensors
        dropout, seed, bias = ctx.dropout, ctx.seed, others[2]
        work = ChunkPlan.of(ctx.spec, q, k, v, *others)
        d_out, out = work.inside(gradients[0]), work.inside(result)  # (B, Hkv, G, T, D)
        d_lse = gradients[1]  # (B, Hkv, G, T)
        d_result = q.new_empty(q.shape)
        d_q = work.inside(d_result)
        d_k, d_v = work.wide(work.k.shape), work.wide(work.v.shape)
        d_bias = work.wide(bias.shape) if bias is not None and ctx.needs_input_grad[8] else None
        for chunk in work.chunks():
            mine = d_out[chunk.rows]
            row_term = (mine.to(lse.dtype) * out[chunk.rows]).sum(-1, keepdim=True)  # D, (B, Hkv, G, t, 1)
            row_term -= d_lse[chunk.rows].unsqueeze(-1)  # each score adds its probability to the log-sum-exp
            scores, slope = work.scores(chunk)
            total = lse[chunk.rows].unsqueeze(-1)
            # A query that sees no key has -infinity for every score and for their sum: it gets zeros.
            probabilities = scores.sub_(total.masked_fill(total == float("-inf"), 0)).exp_()
            d_scores = work.product(mine, work.v[chunk.keys].transpose(-1, -2)).to(lse.dtype)
            kept = _kept(chunk, probabilities, dropout, seed) if dropout else None
            d_v[chunk.keys] += work.summed_product(probabilities if kept is None else probabilities * kept, mine)
            if kept is not None:
                d_scores.mul_(kept)
            d_scores.sub_(row_term).mul_(probabilities)
            if d_bias is not None:
                work.add_to_bias(d_bias, d_scores, chunk)
            if slope is not None:
                d_scores.mul_(slope)
            d_scores.mul_(work.rest)
            d_q[chunk.rows] = work.product(d_scores, work.k[chunk.keys])
            d_k[chunk.keys] += work.summed_product(d_scores, work.q[chunk.rows])
        d_result.mul_(work.root)
        d_k, d_v = d_k.mul_(work.root).to(k.dtype).transpose(1, 2), d_v.to(v.dtype).transpose(1, 2)
        of_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return None, None, None, d_result, d_k, d_v, None, None, of_bias, None, None, None


def _kept(chunk: Chunk, like: Tensor, dropout: float, seed: int) -> Tensor:
    """What dropout multiplies a chunk's probabilities by: 0, or 1/(1-p); the same whenever it is asked."""
    generator = torch.Generator(like.device).manual_seed(seed + chunk.number)
    kept = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32) >= dropout
    return kept.to(like.dtype).mul_(1 / (1 - dropout))
