"""Rows rounded to FP8 where they are made: a program has a whole row, so its scale is known at once.

Import this file only where the kernels are taken; it imports Triton and registers the operators.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.activation.triton_gelu import gate
from hasten.ops.columns import programs, sum_rows

LARGEST = 448.0  # of e4m3
EACH = 2  # programs of the backward pass on a multiprocessor


@triton.jit
def store_rounded(x, narrow, scales, row, places, inside, LARGEST: tl.constexpr):
    """x divided by its scale, in narrow's dtype; the scale."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / LARGEST
    tl.store(narrow + places, (x / scale).to(narrow.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def rows_kernel(x, narrow, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    store_rounded(values, narrow, scales, row, places, inside, LARGEST)


@triton.jit
def gelu_kernel(z, bias, out, narrow, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """One row of gelu(z + bias), in both precisions."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    x = tl.load(z + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    s, _ = gate(x)
    y = x * s
    tl.store(out + places, y.to(out.dtype.element_ty), mask=inside)
    store_rounded(y, narrow, scales, row, places, inside, LARGEST)


@triton.jit
def gelu_backward_kernel(
    d_out, z, bias, dz, narrow, scales, parts, rows, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Every programs-th row: the gradient of z in both precisions, and the sum over rows for the bias's."""
    program, count = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, count):
        places = tl.cast(row, tl.int64) * width + columns
        x = tl.load(z + places, mask=inside, other=0.0).to(tl.float32) + b
        dy = tl.load(d_out + places, mask=inside, other=0.0).to(tl.float32)
        s, slope = gate(x)
        dx = dy * (s + x * s * (1.0 - s) * slope)
        tl.store(dz + places, dx.to(dz.dtype.element_ty), mask=inside)
        store_rounded(dx, narrow, scales, row, places, inside, LARGEST)
        total += dx
    tl.store(parts + program.to(tl.int64) * width + columns, total, mask=inside)


def _sizes(x: Tensor) -> tuple[int, int, dict[str, Any]]:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    return x.numel() // width, width, {"LARGEST": LARGEST, "BLOCK": block, "num_warps": min(16, max(4, block // 512))}


@torch.library.custom_op("hasten_triton::rows_to_fp8", mutates_args=())
def rows_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) in e4m3, and the scale of each row, float32 (M, 1)."""
    x = x.contiguous()
    narrow = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    rows, width, options = _sizes(x)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        rows_kernel[(rows,)](x, narrow, scales, width, **options)
    return narrow, scales


@torch.library.custom_op("hasten_triton::bias_gelu_fp8", mutates_args=())
def bias_gelu_fp8(z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gelu(z + bias) of z (M, W) in its dtype, the same in e4m3, and the scale of each row."""
    z = z.contiguous()
    out, narrow = torch.empty_like(z), torch.empty_like(z, dtype=torch.float8_e4m3fn)
    rows, width, options = _sizes(z)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=z.device)
    with torch.cuda.device_of(z):
        gelu_kernel[(rows,)](z, bias, out, narrow, scales, width, **options)
    return out, narrow, scales


@torch.library.custom_op("hasten_triton::bias_gelu_fp8_backward", mutates_args=())
def bias_gelu_fp8_backward(d_out: Tensor, z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of z in its dtype, in e4m3 with the scale of each row, and the bias's, float32."""
    d_out, z = d_out.contiguous(), z.contiguous()
    dz, narrow = torch.empty_like(z), torch.empty_like(z, dtype=torch.float8_e4m3fn)
    rows, width, options = _sizes(z)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=z.device)
    count = min(rows, programs(z.device, each=EACH))
    parts = torch.empty((1, count, width), dtype=torch.float32, device=z.device)
    with torch.cuda.device_of(z):
        gelu_backward_kernel[(count,)](d_out, z, bias, dz, narrow, scales, parts, rows, width, **options)
        total = sum_rows(parts)[0]
    return dz, narrow, scales, total


def _narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@rows_to_fp8.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _narrow(x)


@bias_gelu_fp8.register_fake
def _(z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), *_narrow(z)


@bias_gelu_fp8_backward.register_fake
def _(d_out: Tensor, z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), *_narrow(z), z.new_empty(z.shape[-1], dtype=torch.float32)
