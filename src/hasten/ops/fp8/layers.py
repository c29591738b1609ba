"""The parts of a transformer's training step in FP8, with their gradients. What is rounded where:

    x        normalised states      by the kernel that adds and normalises
    dy       of a branch            by the same kernel's backward pass
    q, k, v  their gradients        by the kernel that joins them
    h, dz    GELU and its gradient  by their kernels
    heads    attention's output     in a pass of its own

Their 16-bit forms are not written. All products of blocks read FP8: forward, gradients of inputs, gradients of weights.
Queries, keys, values, attention itself and the residual stream stay as wide as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hasten.ops import residual
from hasten.ops.activation.operator import reference_bias_gelu
from hasten.ops.fp8.products import E4M3, Fp8, on_triton, product, rounded, weight_gradient
from hasten.ops.fp8.weights import Fp8Weight
from hasten.ops.residual import AddNormRequest, Norm

FAST_GRADIENTS = False  # sums of the gradients of inputs in the matrix units' own precision


class States(NamedTuple):
    """What a product reads. x (…, C) takes the gradient: the values themselves, or an empty tensor of their shape."""

    x: Tensor
    narrow: Fp8

    @classmethod
    def of(cls, x: Tensor) -> States:
        return cls(x, rounded(x))


class Slot:
    """Where `add_norm` leaves the gradient of a branch in FP8, for the product that the branch comes from."""

    def __init__(self) -> None:
        self.gradient: Fp8 | None = None

    def taken(self, dy: Tensor) -> Fp8:
        """That gradient, or dy rounded."""
        found, self.gradient = self.gradient, None
        return rounded(dy) if found is None else found


class Branch(NamedTuple):
    """What a block adds to the stream; slot: None once something else was made of it."""

    value: Tensor
    slot: Slot | None


def project(
    x: States, weight: Tensor, narrow: Fp8Weight, bias: Tensor | None, splits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (…, splits) of x (…, C): rows of one joined weight."""
    q, k, v = _Projection.apply(x.x, weight, bias, x.narrow, narrow, tuple(splits))
    return q, k, v


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, given: Fp8, narrow: Fp8Weight, splits: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*given)
        ctx.narrow, ctx.bias_dtype = narrow, None if bias is None else bias.dtype
        out = product(given, narrow.rows, weight.dtype, fast=True, bias=bias)
        return out.view(*x.shape[:-1], -1).split(splits, dim=-1)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        d_bias: Tensor | None
        parts = [one.flatten(0, -2) for one in outputs]
        if on_triton(parts[0]):
            from hasten.ops.fp8.triton_rows import join_fp8

            values, scales, d_bias = join_fp8(parts[0], parts[1], parts[2], ctx.bias_dtype or torch.float32)
            dy = Fp8(values, scales)
        else:
            joined = torch.cat(parts, dim=-1)
            dy, d_bias = rounded(joined), joined.sum(0, dtype=torch.float32).to(ctx.bias_dtype or torch.float32)
        d_bias = None if ctx.bias_dtype is None else d_bias
        dx, dw = _gradients(dy, Fp8(*ctx.saved_tensors), ctx.narrow, outputs[0].dtype)
        return dx.view(*outputs[0].shape[:-1], -1), dw, d_bias, None, None, None


def _gradients(dy: Fp8, x: Fp8, weight: Fp8Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of x (M, K) and of the weight (N, K)."""
    return product(dy, weight.columns, dtype, fast=FAST_GRADIENTS), weight_gradient(dy, x, dtype)


def linear(x: States, weight: Tensor, narrow: Fp8Weight) -> Branch:
    """x (…, K) · weightᵀ for weight (N, K)."""
    slot = Slot()
    out: Tensor = _Linear.apply(x.x, weight, x.narrow, narrow, slot)
    return Branch(out, slot)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, given: Fp8, narrow: Fp8Weight, slot: Slot) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.narrow, ctx.slot = narrow, slot
        return product(given, narrow.rows, weight.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        (d_out,) = outputs
        dx, dw = _gradients(ctx.slot.taken(d_out), Fp8(*ctx.saved_tensors), ctx.narrow, d_out.dtype)
        return dx.view(*d_out.shape[:-1], -1), dw, None, None, None


def mlp(x: States, up: Tensor, narrow_up: Fp8Weight, bias: Tensor, down: Tensor, narrow_down: Fp8Weight) -> Branch:
    """gelu(x·upᵀ + bias)·downᵀ of x (…, K), tanh form."""
    slot = Slot()
    out: Tensor = _Mlp.apply(x.x, up, bias, down, x.narrow, narrow_up, narrow_down, slot)
    return Branch(out, slot)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        bias: Tensor,
        down: Tensor,
        given: Fp8,
        narrow_up: Fp8Weight,
        narrow_down: Fp8Weight,
        slot: Slot,
    ) -> Tensor:
        z = product(given, narrow_up.rows, up.dtype, fast=True)
        if on_triton(z):
            from hasten.ops.fp8.triton_rows import bias_gelu_fp8

            h = Fp8(*bias_gelu_fp8(z, bias))
        else:
            h = rounded(reference_bias_gelu(z, bias))
        ctx.save_for_backward(*given, z, *h, bias)
        ctx.narrow, ctx.slot = (narrow_up, narrow_down), slot
        return product(h, narrow_down.rows, down.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        (d_out,) = outputs
        values, scales, z, h_values, h_scales, bias = ctx.saved_tensors
        up, down = ctx.narrow
        dh, d_down = _gradients(ctx.slot.taken(d_out), Fp8(h_values, h_scales), down, d_out.dtype)
        if on_triton(z):
            from hasten.ops.fp8.triton_rows import bias_gelu_fp8_backward

            *made, d_bias = bias_gelu_fp8_backward(dh, z, bias)
            dz = Fp8(*made)
        else:
            wide = torch.ops.aten.gelu_backward(dh.float(), z.float() + bias, approximate="tanh")
            dz, d_bias = rounded(wide.to(z.dtype)), wide.sum(0)
        dx, d_up = _gradients(dz, Fp8(values, scales), up, d_out.dtype)
        return dx.view(*d_out.shape[:-1], -1), d_up, d_bias.to(bias.dtype), d_down, None, None, None, None


def add_norm(
    stream: Tensor, branch: Branch, branch_bias: Tensor | None, norm: Norm, dtype: torch.dtype, *, narrow: bool
) -> tuple[Tensor, States | Tensor]:
    """stream + (branch + branch_bias), float32 (…, C), and its norm: as a product reads it (narrow), or in `dtype`."""
    if not on_triton(stream):
        bound = residual.bind(AddNormRequest(device=stream.device, width=stream.shape[-1]))
        total, x = bound(stream, branch.value, branch_bias, norm, dtype)
        return total, States.of(x) if narrow else x
    total, x, *made = _AddNorm.apply(
        stream, branch.value, branch_bias, norm.weight, norm.bias, norm, dtype, narrow, branch.slot
    )
    return total, States(x, Fp8(*made)) if narrow else x


def _place(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of that shape in one number of memory: only its gradient, or its place among gradients, matters."""
    return like.new_empty_strided(like.shape, (0,) * like.dim(), dtype=dtype)


class _AddNorm(torch.autograd.Function):
    """By the kernels of hasten.ops.residual, which write FP8 beside or in the place of 16 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        dtype: torch.dtype,
        narrow: bool,
        slot: Slot | None,
    ) -> tuple[Tensor, ...]:
        from hasten.ops.residual.triton_add_norm import added

        made = _empty(stream) if narrow else None
        x = _place(stream, dtype) if narrow else torch.empty_like(stream, dtype=dtype)
        own = norm._replace(weight=weight, bias=bias)
        total, means, scales = added(stream, branch, branch_bias, own, None if narrow else x, made)
        ctx.save_for_backward(total, means, scales, weight)
        ctx.norm, ctx.slot, ctx.branch_dtype = norm, slot, branch.dtype
        ctx.dtypes = (None if branch_bias is None else branch_bias.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(*(made or ()))
        ctx.set_materialize_grads(False)
        return total, x, *(made or ())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Any, ...]:
        from hasten.ops.residual.triton_add_norm import gradients

        d_total, dx = outputs[:2]
        total, means, scales, weight = ctx.saved_tensors
        dx = torch.zeros_like(total) if dx is None else dx
        norm, slot = ctx.norm, ctx.slot
        given = d_total, dx, total, means, scales, weight, norm.offset, norm.centred
        if slot is None:
            d_branch = torch.empty_like(total, dtype=ctx.branch_dtype)
            d_stream, sums = gradients(*given, d_branch)
        else:
            d_branch, slot.gradient = _place(total, ctx.branch_dtype), _empty(total)
            d_stream, sums = gradients(*given, None, slot.gradient)
        by_branch, by_bias = ctx.dtypes
        return (
            d_stream,
            d_branch,
            None if by_branch is None else sums[2].to(by_branch),
            sums[0].to(weight.dtype),
            None if by_bias is None else sums[1].to(by_bias),
            *(None,) * 4,
        )


def _empty(x: Tensor) -> Fp8:
    """Room for x (…, C) in FP8, as rows."""
    rows = x.numel() // x.shape[-1]
    return Fp8(x.new_empty((rows, x.shape[-1]), dtype=E4M3), x.new_empty((rows, 1), dtype=torch.float32))
