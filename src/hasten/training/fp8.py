"""Products in FP8 with a scale for each tensor: activations and weights in e4m3, gradients in e5m2 (arXiv 2209.05433).

A tensor is divided by its largest magnitude over the format's largest number, rounded to 8 bits, multiplied with
float32 sums, and the product takes both scales back. The scales are of this very tensor ("dynamic"): no history is
kept. The matrix units read both operands along the sum, so the backward pass needs them transposed as well.

    y  = x·Wᵀ      e4m3 · e4m3
    dx = dy·W      e5m2 · e4m3
    dW = dyᵀ·x     e5m2 · e4m3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten.ops.triton_support import compute_capability

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both sizes of every matrix


def why_not(device: torch.device) -> str | None:
    """Why FP8 products do not run on a device, or None."""
    if device.type != "cuda":
        return f"FP8 products run on CUDA, and the model is on {device}"
    found = compute_capability(device)
    if found < LEAST_CAPABILITY:
        return f"FP8 products need compute capability 8.9 or later, {device} has {'.'.join(map(str, found))}"
    return None


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x/s in an 8-bit format, and s, float32 0-dim."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a (M, K) · bᵀ for b (N, K), both in 8 bits, contiguous; (M, N) in `dtype`."""
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=False)
    return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = rounded(x, FORWARD)
        w8, w_scale = rounded(weight, FORWARD)
        ctx.save_for_backward(x8, w8, x_scale, w_scale)
        ctx.dtypes = x.dtype, weight.dtype
        return product(x8, w8, x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8, x_scale, w_scale = ctx.saved_tensors
        dy, dy_scale = rounded(gradients[0], BACKWARD)
        dx = product(dy, w8.t().contiguous(), dy_scale, w_scale, ctx.dtypes[0])
        dw = product(dy.t().contiguous(), x8.t().contiguous(), dy_scale, x_scale, ctx.dtypes[1])
        return dx, dw


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, K) · weightᵀ for weight (N, K), in FP8; differentiable."""
    out: Tensor = _Fp8Product.apply(x.flatten(0, -2), weight)
    return out.unflatten(0, x.shape[:-1])
