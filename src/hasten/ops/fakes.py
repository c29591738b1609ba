"""Output shapes of the native operators, for torch.compile: each function is the fake implementation of one.

It has the operator's name and arguments, and returns empty tensors of the right shapes. `hasten.ops.native` reads those
without an underscore.
"""

from typing import Any

import torch
from torch import Tensor

from hasten.ops.panels import PANEL, panel_shape


def _like_first(x: Tensor, *rest: Any) -> Tensor:
    """Output like the first argument, contiguous."""
    return x.new_empty(x.shape)


def _plan(*arguments: Any) -> Tensor:
    """Bytes that only the native code can read; how many it alone knows."""
    first = next(one for one in arguments if isinstance(one, Tensor))
    return first.new_empty(0, dtype=torch.uint8)


# linear/linear.cpp


def linear(
    x: Tensor, data: Tensor, scales: Any, zeros: Any, outer: Any, bias: Any, out_features: int, *rest: int
) -> Tensor:
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


def transposed_panels(
    data: Tensor, scales: Any, zeros: Any, outer: Any, first: int, count: int, in_features: int, group_size: int
) -> Tensor:
    """(K, 64·count) in float32."""
    return data.new_empty((in_features, count * PANEL), dtype=torch.float32)


def unpacked_rows(
    ids: Tensor, data: Tensor, scales: Any, zeros: Any, outer: Any, out_features: int, in_features: int, group_size: int
) -> Tensor:
    """(R, K) in float32."""
    return data.new_empty((ids.numel(), in_features), dtype=torch.float32)


# block/block.cpp


def attention_input(x: Tensor, *rest: Any) -> Tensor:
    """q (R, H, D)."""
    heads, head_dim = rest[6], rest[7]
    return x.new_empty(x.shape[:-1].numel(), heads, head_dim)


def linear_add(x: Tensor, data: Tensor, scales: Any, zeros: Any, outer: Any, bias: Any, *rest: Any) -> Tensor:
    """Output like the residual."""
    residual: Tensor = rest[2]
    return residual.new_empty(residual.shape)


def mlp_input(x: Tensor, *rest: Any) -> Tensor:
    """(…, I)."""
    return x.new_empty((*x.shape[:-1], rest[6]))


def norm_linear(x: Tensor, *rest: Any) -> Tensor:
    """(…, N) in float32."""
    return x.new_empty((*x.shape[:-1], rest[12]), dtype=torch.float32)


blocks = _like_first
plan_weight = plan_block = plan_pattern = _plan

# collective/collective.cpp

plan_ranks = _plan


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


# block/grow.cpp


def grow(tokens: Tensor, counts: Any, starts: Any, most: int, *rest: Any) -> Tensor:
    """(most, B, 2), or fewer steps."""
    return tokens.new_empty((most, len(counts), 2), dtype=torch.float64)


# draw/draw.cpp


def draw(scores: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """(B,)."""
    return torch.empty_like(seeds)


def largest(scores: Tensor, count: int) -> Tensor:
    """(B, count)."""
    return scores.new_empty((scores.shape[0], count))


# attention/native.cpp and train.cpp


attention = _like_first  # (R, H, D)


def train_attention(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D) and the log-sum-exp (B, H, T)."""
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


def train_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, contiguous."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# activation/activation.cpp


bias_gelu = silu_mul = _like_first


def bias_gelu_backward(dout: Tensor, z: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of z, and of the bias in float32."""
    return z.new_empty(z.shape), z.new_empty(z.shape[-1:], dtype=torch.float32)


def silu_mul_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)
