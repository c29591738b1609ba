"""Products in FP8 (e4m3, arXiv 2209.05433) with a scale for each row, found in the row itself ("dynamic", no history).

    y  = x·Wᵀ     FP8: rows of x, rows of W
    dx = dy·W     FP8: rows of dy, columns of W
    dW = dyᵀ·x    16 bits: its sum runs over rows, each of which has another scale

A row is divided by its largest magnitude over 448 and rounded to three bits of mantissa; the product is summed in
float32 and takes both scales back. Rows are rounded by the kernel that makes them where it is ours: GELU and its
gradient write both precisions at once, so a scale costs no pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten.ops.activation.operator import reference_bias_gelu
from hasten.ops.triton_support import compute_capability

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
E4M3 = torch.float8_e4m3fn
MULTIPLE = 16  # of both sizes of every matrix
WIDEST = 16_384  # numbers of a row that a program of the kernels holds


def why_not(device: torch.device) -> str | None:
    """Why FP8 products do not run on a device, or None."""
    if device.type != "cuda":
        return f"FP8 products run on CUDA, and the model is on {device}"
    found = compute_capability(device)
    if found < LEAST_CAPABILITY:
        return f"FP8 products need compute capability 8.9 or later, {device} has {'.'.join(map(str, found))}"
    return None


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) in e4m3, and the scale of each row, float32 (M, 1)."""
    if x.is_cuda:
        from hasten.ops.fp8.triton_rows import rows_to_fp8

        narrow, scales = rows_to_fp8(x)
        return narrow, scales
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(E4M3).max
    return (wide / scales).to(E4M3), scales


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool) -> Tensor:
    """a (M, K) · bᵀ for b (N, K), both rounded, with the scales of their rows: (M, N) in `dtype`.

    fast: sums in the matrix units' own precision, a little less than float32's; else they are moved to float32 often.
    """
    (x, x_scales), (y, y_scales) = a, b
    if x.is_cuda:
        return torch._scaled_mm(x, y.t(), x_scales, y_scales.t(), out_dtype=dtype, use_fast_accum=fast)
    return ((x.float() @ y.float().t()) * x_scales * y_scales.t()).to(dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(rounded(x), rounded(weight), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = gradients[0]
        return product(rounded(dy), _columns(weight), x.dtype, fast=False), dy.t() @ x


class _Fp8Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        z = product(rounded(x), rounded(up), x.dtype, fast=True)
        if x.is_cuda:
            from hasten.ops.fp8.triton_rows import bias_gelu_fp8

            h, narrow, scales = bias_gelu_fp8(z, bias)
        else:
            h = reference_bias_gelu(z, bias)
            narrow, scales = rounded(h)
        ctx.save_for_backward(x, up, bias, down, z, h)
        return product((narrow, scales), rounded(down), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, up, bias, down, z, h = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dh = product(rounded(dy), _columns(down), x.dtype, fast=False)
        if x.is_cuda:
            from hasten.ops.fp8.triton_rows import bias_gelu_fp8_backward

            dz, narrow, scales, by_bias = bias_gelu_fp8_backward(dh, z, bias)
        else:
            dz, by_bias = _gelu_gradient(dh, z, bias)
            narrow, scales = rounded(dz)
        dx = product((narrow, scales), _columns(up), x.dtype, fast=False)
        return dx, dz.t() @ x, by_bias.to(bias.dtype), dy.t() @ h


def _columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a weight as rows, rounded."""
    return rounded(weight.t().contiguous())


def _gelu_gradient(dh: Tensor, z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Of z in its dtype, and of the bias, for gelu(z + bias), the tanh form."""
    wide = torch.ops.aten.gelu_backward(dh.float(), z.float() + bias, approximate="tanh")
    return wide.to(z.dtype), wide.sum(0)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, K) · weightᵀ for weight (N, K), in FP8; differentiable."""
    out: Tensor = _Fp8Linear.apply(x.flatten(0, -2), weight)
    return out.unflatten(0, x.shape[:-1])


def fp8_mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """gelu(x·upᵀ + bias)·downᵀ of x (…, K), tanh form, with its four forward and input-gradient products in FP8."""
    out: Tensor = _Fp8Mlp.apply(x.flatten(0, -2), up, bias, down)
    return out.unflatten(0, x.shape[:-1])
