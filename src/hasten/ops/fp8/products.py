"""Products in FP8 (e4m3, arXiv 2209.05433) with a scale for each row, found in the row itself ("dynamic", no history).

    y  = x·Wᵀ       rows of x, rows of W
    dx = dy·W       rows of dy, columns of W
    dW = (dy·s)ᵀ·x  columns of dy and x; s moves the scales of x's rows, which the sum runs over, to dy

Every matrix is rounded once: a row is divided by a power of two and rounded to three bits of mantissa. A weight has one
scale, so its columns are the same bytes transposed. Those of x are too, and those of dy move their exponents. Sums are
in float32 and take the scales back.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.ops import triton_support
from hasten.ops.triton_support import compute_capability

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
E4M3 = torch.float8_e4m3fn
LARGEST, LEAST = 448.0, 1e-15  # as in triton_fp8.py
MULTIPLE = 16  # of both sizes of every matrix
WIDEST = 16_384  # numbers of a row that a program of the kernels holds


class Fp8(NamedTuple):
    """values (M, K) in e4m3; row i is multiplied by scales[i], float32 (M, 1) or (1, 1), a power of two."""

    values: Tensor
    scales: Tensor


def why_not(device: torch.device) -> str | None:
    """Why FP8 products do not run on a device, or None."""
    if device.type != "cuda":
        return f"FP8 products run on CUDA, and the model is on {device}"
    found = compute_capability(device)
    if found < LEAST_CAPABILITY:
        return f"FP8 products need compute capability 8.9 or later, {device} has {'.'.join(map(str, found))}"
    reason = triton_support.refusal(device)
    return None if reason is None else f"Triton's kernels round to FP8: {reason}"


def on_triton(x: Tensor) -> bool:
    """Whether Triton's kernels round x."""
    return triton_support.refusal(x.device) is None


def scale_of(largest: Tensor) -> Tensor:
    """The smallest powers of two that bring numbers of these magnitudes (float32) into e4m3's range."""
    bits = (largest.clamp(min=LEAST) / LARGEST).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def rounded(x: Tensor) -> Fp8:
    """x (…, K) as rows (M, K) in FP8."""
    x = x.detach().flatten(0, -2)
    if on_triton(x):
        from hasten.ops.fp8.triton_rows import rows_to_fp8

        return Fp8(*rows_to_fp8(x))
    wide = x.float()
    scales = scale_of(wide.abs().amax(dim=1, keepdim=True))
    return Fp8((wide / scales).to(E4M3), scales)


def product(
    a: Fp8, b: Fp8, dtype: torch.dtype, *, fast: bool, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """a (M, K) · bᵀ + bias for b (N, K): (M, N) in `dtype`, written to `out` if given. Both have one scale, or neither.

    fast: sums in the matrix units' own precision, a little less than float32's; else they are moved to float32 often.
    """
    if a.values.is_cuda:
        multiply = partial(torch._scaled_mm, bias=bias, out_dtype=dtype, use_fast_accum=fast)
        given = a.values, b.values.t(), a.scales, b.scales.t()
        return multiply(*given) if out is None else multiply(*given, out=out)
    found = (a.values.float() @ b.values.float().t()) * a.scales * b.scales.t()
    found = (found if bias is None else found + bias).to(dtype)
    return found if out is None else out.copy_(found)


def weight_gradient(dy: Fp8, x: Fp8, dtype: torch.dtype) -> Tensor:
    """dyᵀ·x of dy (M, N) and x (M, K): (N, K) in `dtype`."""
    if on_triton(x.values):
        from hasten.ops.fp8.triton_columns import columns

        by_dy, by_x, scales = columns(*dy, *x)
        if x.values.is_cuda:
            return torch._scaled_mm(by_dy, by_x.t(), scales[:1], scales[4:5], out_dtype=dtype, use_fast_accum=False)
        return (by_dy.float() @ by_x.float().t() * scales[0]).to(dtype)
    both = dy.scales * x.scales
    top = both.max()
    moved = (dy.values.float() * (both / top)).to(E4M3)
    return (moved.float().t() @ x.values.float() * top).to(dtype)
