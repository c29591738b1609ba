"""Output shapes of the native operators, for torch.compile: each function gives those of one.

It has the operator's name, takes its arguments by their names, and returns empty tensors of the right shapes.
`hasten.ops.native` reads those without an underscore, and refuses names that an operator does not have.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.ops.panels import PANEL, panel_shape

# linear/linear.cpp


def linear(x: Tensor, out_features: int, **rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def pack_bf16(w: Tensor) -> Tensor:
    return _panels(w, 16)


def pack_bytes(w: Tensor, group_size: int) -> Tensor:
    return _panels(w, 8, group_size)


def pack_integers(q: Tensor, bits: int) -> Tensor:
    return _panels(q, bits)


def pack_int4(q: Tensor, group_size: int) -> Tensor:
    return _panels(q, 4, group_size)


def pack_int4_words(words: Tensor, group_size: int) -> Tensor:
    return _panels(words, 4, group_size, columns=8)


def _panels(values: Tensor, bits: int, group_size: int = 0, columns: int = 1) -> Tensor:
    """columns: values of the weight in one of these."""
    n, k = values.shape
    shape = panel_shape(n, k * columns, bits, group_size)
    return values.new_empty(shape, dtype=torch.bfloat16 if bits == 16 else torch.uint8)


# linear/blocks.cpp


def pack_blocks(
    rows: Tensor, type: int, data: Tensor, scales: Tensor, minima: Tensor | None, outer: Tensor | None
) -> None:
    """In place."""


# linear/unpacked.cpp


def transposed_panels(data: Tensor, count: int, in_features: int, **rest: Any) -> Tensor:
    """(K, 64·count) in float32."""
    return data.new_empty((in_features, count * PANEL), dtype=torch.float32)


def unpacked_rows(ids: Tensor, data: Tensor, in_features: int, **rest: Any) -> Tensor:
    """(R, K) in float32."""
    return data.new_empty((ids.numel(), in_features), dtype=torch.float32)


# block/block.cpp


def attention_input(x: Tensor, heads: int, head_dim: int, **rest: Any) -> Tensor:
    """q (R, H, D)."""
    return x.new_empty(x.shape[:-1].numel(), heads, head_dim)


def linear_add(residual: Tensor, **rest: Any) -> Tensor:
    return residual.new_empty(residual.shape)


def mlp_input(x: Tensor, inner_size: int, **rest: Any) -> Tensor:
    """(…, I)."""
    return x.new_empty((*x.shape[:-1], inner_size))


def norm_linear(x: Tensor, out_features: int, **rest: Any) -> Tensor:
    """(…, N) in float32."""
    return x.new_empty((*x.shape[:-1], out_features), dtype=torch.float32)


def blocks(x: Tensor, **rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def plan_weight(data: Tensor, **rest: Any) -> Tensor:
    return _plan(data)


def plan_block(output: Tensor, **rest: Any) -> Tensor:
    return _plan(output)


def plan_latent(keys: Tensor, **rest: Any) -> Tensor:
    return _plan(keys)


def plan_stack(plans: Sequence[Tensor], **rest: Any) -> Tensor:
    return _plan(plans[0])


def plan_cache(k: Sequence[Tensor], inputs: Sequence[Tensor], **rest: Any) -> Tensor:
    return _plan((*k, *inputs)[0])


# delta/delta.cpp, ssd/mamba.cpp


def plan_delta(conv: Tensor, **rest: Any) -> Tensor:
    return _plan(conv)


def plan_mamba(conv: Tensor, **rest: Any) -> Tensor:
    return _plan(conv)


# states/short_convolution.cpp, states/mixer.cpp


def plan_short_convolution(conv: Tensor, **rest: Any) -> Tensor:
    return _plan(conv)


def state_mixer(x: Tensor, inputs: Tensor, matrices: Tensor | None, **rest: Any) -> Tensor:
    """(R, values), as many as the matrices of all heads have columns, or as a short convolution has channels."""
    values = inputs.shape[-1] if matrices is None else matrices.shape[1] * matrices.shape[3]
    return x.new_empty((x.shape[0], values))


# block/experts.cpp


def plan_experts(down: list[Tensor], **rest: Any) -> Tensor:
    return _plan(down[0])


def experts(x: Tensor, **rest: Any) -> Tensor:
    """(…, C) in float32."""
    return torch.empty_like(x)


def _plan(like: Tensor) -> Tensor:
    """Bytes that only the native code can read; how many it alone knows."""
    return like.new_empty(0, dtype=torch.uint8)


# collective/collective.cpp


def plan_ranks(segment: Tensor, **rest: Any) -> Tensor:
    return _plan(segment)


def sum_of_ranks(ranks: Tensor, x: Tensor) -> None:
    """In place."""


def abandon_ranks(ranks: Tensor) -> None:
    """Nothing."""


def segment_bytes(size: int) -> int:
    """Known to the native code alone."""
    return 0


def gather_ranks(ranks: Tensor, x: Tensor, sizes: Any) -> Tensor:
    """(…, sum of sizes)."""
    return x.new_empty((*x.shape[:-1], sum(sizes)))


# block/draft.cpp


def draft_in_one_call(tokens: Tensor, counts: Any, most: int, **rest: Any) -> Tensor:
    """(most, B, 2), or fewer steps."""
    return tokens.new_empty((most, len(counts), 2), dtype=torch.float64)


# draw/draw.cpp


def draw(scores: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """(B,)."""
    return torch.empty_like(seeds)


def largest(scores: Tensor, count: int) -> Tensor:
    """(B, count)."""
    return scores.new_empty((scores.shape[0], count))


def likeliest(scores: Tensor) -> Tensor:
    """(B,)."""
    return scores.new_empty(scores.shape[:1], dtype=torch.int64)


# rounding/rounding.cpp


def round_groups(w: Tensor, **rest: Any) -> bool:
    """In place."""
    return True


def round_columns(w: Tensor, **rest: Any) -> bool:
    """In place."""
    return True


# attention/native.cpp and train.cpp


def attention(q: Tensor, **rest: Any) -> Tensor:
    """(R, H, D)."""
    return q.new_empty(q.shape)


def plan_pattern(table: Tensor, **rest: Any) -> Tensor:
    return _plan(table)


def train_attention(q: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D) and the log-sum-exp (B, H, T)."""
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


def train_attention_backward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, contiguous."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# activation/activation.cpp


def bias_gelu(z: Tensor, **rest: Any) -> Tensor:
    return z.new_empty(z.shape)


def silu_mul(gate: Tensor, **rest: Any) -> Tensor:
    return gate.new_empty(gate.shape)


def bias_gelu_backward(z: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """The gradients of z, and of the bias in float32."""
    return z.new_empty(z.shape), z.new_empty(z.shape[-1:], dtype=torch.float32)


def silu_mul_backward(gate: Tensor, up: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)
