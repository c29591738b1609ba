"""Samples tokens from processed logits: the reference, and native kernels that give the same tokens faster.

The draw is a race of exponential clocks: with E_i ~ Exp(1), argmax p_i / E_i is distributed as p. In logarithms it is
argmax(score_i - log E_i), the Gumbel-max trick, which needs no softmax and no sorting.

The noise. A row must get the same tokens alone, in a batch, and after rows left the batch. One `torch.Generator` for
the batch cannot do that, and one for each row runs on the CPU (V numbers for each row and token, then a copy to the
device). So the noise is a pure function of (seed, step, token id): SplitMix64 (Steele, Lea, Flood 2014), a
counter-based generator, in int64 tensor arithmetic, on whatever device the scores are.

The native kernel (draw.cpp) computes logarithms only for tokens that can win. It rounds differently from the reference,
so the reference decides if two tokens are too close. On CUDA, Triton kernels go from logits to tokens
(`draw_at_once`) without writing scores or noise.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor

from hasten.ops import triton_support
from hasten.ops.draw.splitmix import FIRST, GOLDEN, SECOND
from hasten.ops.native import library


def draw(scores: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """The tokens (B,) int64 that win in scores (B, V) float32 with the noise of seeds and steps (B,) int64.

    A row that is -inf everywhere gives token 0.
    """
    native = scores.device.type == "cpu" and not torch.compiler.is_compiling()
    ops = _operators(os.environ.get("HASTEN_ISA")) if native else None
    if ops is None:
        if scores.is_cuda and _on_triton(scores):
            from hasten.ops.draw import triton_draw

            return triton_draw.draw(scores, seeds, steps, None, None, None, None, None, True)
        return reference_draw(scores, seeds, steps)
    tokens: Tensor = ops.draw.default(scores, seeds, steps)
    near = (tokens < 0).nonzero()[:, 0]
    return tokens.index_copy_(0, near, reference_draw(scores[near], seeds[near], steps[near])) if len(near) else tokens


def reference_draw(scores: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """`draw` by its definition."""
    return (scores - exponential_noise(seeds, steps, vocab_size=scores.shape[1]).log()).argmax(dim=-1)


def largest(scores: Tensor, count: int) -> Tensor:
    """The largest scores of each row (B, V) float32 -> (B, count), descending."""
    native = scores.device.type == "cpu" and not torch.compiler.is_compiling()
    ops = _operators(os.environ.get("HASTEN_ISA")) if native else None
    return scores.topk(count, dim=-1).values if ops is None else ops.largest.default(scores, count)


def likeliest(scores: Tensor) -> Tensor:
    """The place of each row's largest score (B, V) -> (B,) int64; of equals the first, of NaNs too.

    On a CPU argmax takes several times as long for one row, and shares rows out to threads that a busy machine may have
    put to sleep.
    """
    native = scores.device.type == "cpu" and scores.dtype == torch.float32 and not torch.compiler.is_compiling()
    ops = _operators(os.environ.get("HASTEN_ISA")) if native else None
    return scores.argmax(dim=-1) if ops is None else ops.likeliest.default(scores)


def draw_at_once(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    *,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    log_min_p: Tensor | None,
    greedy: Tensor | None,
    drawn: bool,
) -> Tensor | None:
    """The tokens (B,) of logits (B, V) after temperature, top-k, top-p and min-p; None if no kernel supports that.

    The settings are `hasten.engine.sampling.RowParams`' own. drawn: False where all rows are greedy.
    """
    if not (logits.is_cuda and _on_triton(logits)):
        return None
    from hasten.ops.draw import triton_draw

    return triton_draw.draw(logits, seeds, steps, temperature, top_k, top_p, log_min_p, greedy, drawn)


def least_kept(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor | None:
    """The smallest score of each row that top-k and then top-p keep, (B, 1); None where no kernel finds it here.

    scores (B, V) float32; top_k (B, 1) int64, V: off; top_p (B, 1) float32, 1: off.
    """
    if not (scores.is_cuda and _on_triton(scores)):
        return None
    from hasten.ops.draw import triton_draw

    return triton_draw.least_kept(scores, top_k, top_p)


def _on_triton(scores: Tensor) -> bool:
    return triton_support.refusal(scores.device) is None


@functools.cache
def _operators(_isa: str | None) -> Any:
    """The native operators of $HASTEN_ISA, looked up once: a draw of few tokens takes less time."""
    native = library()
    return None if native is None else native.ops


def exponential_noise(seeds: Tensor, steps: Tensor, *, vocab_size: int) -> Tensor:
    """Exp(1) noise (B, V) float32, a pure function of the row's seed and step (both (B,) int64) and the token id.

    Values are within [2**-54, 16.7]: never 0 or inf, and with full relative precision near 0, where races are won.
    """
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=seeds.device) * GOLDEN  # (V,)
    key, spare = seeds.clone(), torch.empty_like(seeds)
    _mix(_mix(key, spare).add_(steps * GOLDEN), spare)
    # On a CPU a few rows at a time: what is written is still in a core's own cache when the next operation reads it.
    # (32 rows of 32,000 tokens at once took ten times as long.)
    in_cache = seeds.device.type == "cpu" and not torch.compiler.is_compiling()
    rows = max(1, _ROWS_ELEMENTS // vocab_size) if in_cache else len(seeds)
    noise = torch.empty(len(seeds), vocab_size, device=seeds.device)
    bits = torch.empty(rows, vocab_size, dtype=torch.int64, device=seeds.device)
    spare = torch.empty_like(bits)
    for start in range(0, len(seeds), rows):
        part = key[start : start + rows, None]
        own, other, target = bits[: len(part)], spare[: len(part)], noise[start : start + rows]
        _mix(torch.add(part, ids, out=own), other)
        torch.bitwise_right_shift(own, 11, out=other).bitwise_and_((1 << 53) - 1)
        target.copy_(other).mul_(2.0**-53).clamp_(2.0**-54, 1 - 2.0**-24).neg_().log1p_().neg_()
    return noise


_ROWS_ELEMENTS = 1 << 15  # elements that are worked on at a time on a CPU: PyTorch starts no threads for fewer


def _mix(z: Tensor, spare: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place: every bit of the result depends on every bit of z."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        # int64 shifts copy the sign: mask it off.
        torch.bitwise_right_shift(z, shift, out=spare).bitwise_and_((1 << (64 - shift)) - 1)
        z.bitwise_xor_(spare)
        if factor is not None:
            z.mul_(factor)
    return z
