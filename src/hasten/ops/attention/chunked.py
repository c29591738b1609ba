"""Memory-efficient attention in plain tensor operations: any device, any option, memory linear in the length.

As in Rabe & Staats (arXiv 2112.05682) and xformers: the queries are taken in chunks, so that only a chunk's scores are
ever in memory, and only output and log-sum-exp of every query are kept. The backward pass computes the scores of each
chunk again from q, k and the log-sum-exp; as in FlashAttention the row term D = Σ dO·O replaces the softmax's own sum.

    for each chunk of queries:        P  = exp(scale·Q Kᵀ - lse)
        dV += Pᵀ dO                   dS = P · (dO Vᵀ - D)
        dQ  = scale·dS K              dK += scale·dSᵀ Q
"""

from typing import Any

import torch
from torch import Tensor

from hasten.ops.attention.chunks import Chunk, ChunkPlan
from hasten.ops.attention.inputs import PLAIN, AttentionInputs, as_autocast, per_document
from hasten.ops.attention.spec import AttentionSpec


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
        return _Chunked.apply(spec, inputs.dropout, seed, q, k, v, *tensors)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: AttentionSpec, dropout: float, seed: int, q: Tensor, *others: Tensor) -> Tensor:
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
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, lse, q, k, v, *others = ctx.saved_tensors
        dropout, seed, bias = ctx.dropout, ctx.seed, others[2]
        work = ChunkPlan.of(ctx.spec, q, k, v, *others)
        d_out, out = work.inside(gradients[0]), work.inside(result)  # (B, Hkv, G, T, D)
        d_result = q.new_empty(q.shape)
        d_q = work.inside(d_result)
        d_k, d_v = work.wide(work.k.shape), work.wide(work.v.shape)
        d_bias = work.wide(bias.shape) if bias is not None and ctx.needs_input_grad[8] else None
        for chunk in work.chunks():
            mine = d_out[chunk.rows]
            row_term = (mine.to(lse.dtype) * out[chunk.rows]).sum(-1, keepdim=True)  # D, (B, Hkv, G, t, 1)
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
        d_k.mul_(work.root)
        d_k, d_v = work.outside(d_k.to(k.dtype)), work.outside(d_v.to(v.dtype))
        of_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return None, None, None, d_result, d_k, d_v, None, None, of_bias, None, None, None


def _kept(chunk: Chunk, like: Tensor, dropout: float, seed: int) -> Tensor:
    """What dropout multiplies a chunk's probabilities by: 0, or 1/(1-p); the same whenever it is asked."""
    generator = torch.Generator(like.device).manual_seed(seed + chunk.number)
    kept = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32) >= dropout
    return kept.to(like.dtype).mul_(1 / (1 - dropout))
