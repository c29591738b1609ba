"""Parts of a whole model's pass with hand-written gradients, for a step that is not compiled.

    embed       embeddings and the first norm; its gradient is added to the tied head's, in place
    projection  queries, keys and values from one product; their gradients are joined and summed in one pass
    loss        its gradients are computed with their final factor, which saves a pass

They use Triton kernels on CUDA (and in Triton's interpreter), elsewhere PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops import triton_support
from hasten.ops.loss.chunked import kernel_of
from hasten.ops.loss.kernels import Head
from hasten.ops.loss.pieces import loss_and_gradients
from hasten.ops.residual import Norm, normalized
from hasten.ops.residual.operator import WIDEST


class Tied:
    """Passes the gradient of a tied head from the loss to the embedding, which adds its own."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def taken(self, table: Tensor) -> Tensor:
        """Take the gradient, or zeros like `table` if there is none."""
        found, self.gradient = self.gradient, None
        return torch.zeros_like(table) if found is None else found


def embed(
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    position_table: Tensor | None,
    norm: Norm,
    dtype: torch.dtype,
    tied: Tied,
) -> tuple[Tensor, Tensor]:
    """Embed tokens and positions (B, T) to the residual stream (B, T, C), float32, and its norm in `dtype`.

    table, position_table: float32. tied: holds the gradient of a head that shares the table.
    """
    if triton_support.refusal(table.device) is None and table.shape[1] <= WIDEST:
        stream, x, _, _ = _EmbedNorm.apply(
            tokens, positions, table, position_table, norm.weight, norm.bias, norm, dtype, tied
        )
        return stream, x
    stream = _Embed.apply(tokens, positions, table, position_table, tied)
    return stream, normalized(stream, norm).to(dtype)


def _of_positions(positions: Tensor, table: Tensor | None, d_stream: Tensor) -> Tensor | None:
    """Gradient of the position table."""
    if table is None:
        return None
    width = table.shape[1]
    rows = d_stream.reshape(-1, positions.numel(), width).sum(0)
    return torch.zeros_like(table).index_add_(0, positions.flatten(), rows)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, positions: Tensor, table: Tensor, position_table: Tensor | None, tied: Tied
    ) -> Tensor:
        ctx.save_for_backward(tokens, positions, table, position_table)
        ctx.tied = tied
        stream = F.embedding(tokens, table)
        return stream if position_table is None else stream + F.embedding(positions, position_table)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_stream,) = outputs
        tokens, positions, table, position_table = ctx.saved_tensors
        gradient = ctx.tied.taken(table)
        gradient.index_add_(0, tokens.flatten(), d_stream.reshape(-1, table.shape[1]))
        return None, None, gradient, _of_positions(positions, position_table, d_stream), None


class _EmbedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        positions: Tensor,
        table: Tensor,
        position_table: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        dtype: torch.dtype,
        tied: Tied,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from hasten.ops.residual.triton_embed import embed_norm

        where = None if position_table is None else positions.contiguous()
        own = norm._replace(weight=weight, bias=bias)
        found = embed_norm(tokens, table, where, position_table, own, dtype)
        stream, _, means, scales = found
        ctx.save_for_backward(tokens, positions, table, position_table, weight, bias, stream, means, scales)
        ctx.options = norm.offset, norm.centred
        ctx.tied = tied
        ctx.mark_non_differentiable(means, scales)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        from hasten.ops.residual.triton_add_norm import gradients
        from hasten.ops.residual.triton_embed import scatter

        d_total, d_normed = outputs[:2]
        tokens, positions, table, position_table, weight, bias, stream, means, scales = ctx.saved_tensors
        if d_normed is None:
            d_normed = torch.zeros_like(stream)
        offset, centred = ctx.options
        d_stream, sums = gradients(d_total, d_normed, stream, means, scales, weight, offset, centred, None)
        gradient = ctx.tied.taken(table)
        scatter(gradient, tokens, d_stream)
        of_positions = _of_positions(positions, position_table, d_stream)
        of_bias = None if bias is None else sums[1].to(bias.dtype)
        return None, None, gradient, of_positions, sums[0].to(weight.dtype), of_bias, None, None, None


def projection(x: Tensor, weight: Tensor, bias: Tensor | None, splits: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Project x (…, C) to q, k, v (…, splits) with one joined weight."""
    q, k, v = _Projection.apply(x, weight, bias, tuple(splits))
    return q, k, v


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, splits: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias).split(splits, dim=-1)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_bias = None
        if ctx.bias_dtype is None:
            dy = torch.cat(outputs, dim=-1)
        elif triton_support.refusal(x.device) is None:
            from hasten.ops.residual.triton_join import join

            dq, dk, dv = outputs
            dy, d_bias = join(dq, dk, dv, ctx.bias_dtype)
        else:
            dy = torch.cat(outputs, dim=-1)
            d_bias = dy.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        dy, flat = dy.flatten(0, -2), x.flatten(0, -2)
        return (dy @ weight).view(x.shape), dy.t() @ flat, d_bias, None


def loss(
    x: Tensor, weight: Tensor, targets: Tensor, head: Head, kernel: str, scale: Tensor, tied: Tied | None
) -> Tensor:
    """`scale` times the sum of the token losses of x (N, C); call backward with gradient 1, which is assumed.

    weight: the float32 parameter; head.weight: the matrix that is multiplied. kernel: "chunked" or "chunked-triton".
    tied: receives the weight's gradient, for the embedding to add its own; None if head and embedding are not tied.
    """
    found: Tensor = _Loss.apply(x, weight, head.bias, targets, head, kernel_of(kernel), scale, tied)
    return found


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        kernel: tuple[Callable[..., Tensor | None], Callable[[int, int], int]],
        scale: Tensor,
        tied: Tied | None,
    ) -> Tensor:
        make, rows_of = kernel
        head = head._replace(bias=bias, scale=scale)
        rows = rows_of(x.shape[0], head.weight.shape[0])
        needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        total, by_x, by_weight, by_bias = loss_and_gradients(x, targets, head, rows, make, needed)
        if tied is not None:
            tied.gradient, by_weight = by_weight, None
        ctx.gradients = (by_x, by_weight, None if by_bias is None or bias is None else by_bias.to(bias.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward pass; compute the loss again")
        return (*found, *(None,) * 5)
