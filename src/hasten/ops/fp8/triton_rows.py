"""Rows rounded to FP8 where they are made: a program has a whole row, so its scale is known at once.

Import this file only where the kernels are taken; it imports Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.activation.triton_gelu import gate
from hasten.ops.columns import programs, sum_rows
from hasten.ops.triton_fp8 import store_rounded

EACH = 16  # numbers of a thread
EACH_OF_SUMS = 8  # in the kernels that sum over rows, which need more registers
WARPS_OF_SUMS = 32  # of those kernels on a multiprocessor


@triton.jit
def rows_kernel(x, narrow, scales, width, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    store_rounded(values, narrow, scales, row, places, inside)


@triton.jit
def gelu_kernel(z, bias, narrow, scales, width, BLOCK: tl.constexpr):
    """One row of gelu(z + bias)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    x = tl.load(z + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    s, _ = gate(x)
    store_rounded(x * s, narrow, scales, row, places, inside)


@triton.jit
def gelu_backward_kernel(d_out, z, bias, narrow, scales, parts, rows, width, BLOCK: tl.constexpr):
    """Every programs-th row: the gradient of z, and the sum over rows for the bias's."""
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
        store_rounded(dx, narrow, scales, row, places, inside)
        total += dx
    tl.store(parts + program.to(tl.int64) * width + columns, total, mask=inside)


@triton.jit
def join_kernel(a, b, c, narrow, scales, parts, rows, a_width, b_width, width, BLOCK: tl.constexpr):
    """Every programs-th row of (a | b | c), and the sums over rows."""
    program, count = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    in_a = columns < a_width
    in_b = (columns >= a_width) & (columns < a_width + b_width)
    in_c = (columns >= a_width + b_width) & inside
    for row in range(program, rows, count):
        wide = tl.cast(row, tl.int64)
        x = tl.load(a + wide * a_width + columns, mask=in_a, other=0.0).to(tl.float32)
        x += tl.load(b + wide * b_width + (columns - a_width), mask=in_b, other=0.0).to(tl.float32)
        x += tl.load(c + wide * b_width + (columns - a_width - b_width), mask=in_c, other=0.0).to(tl.float32)
        store_rounded(x, narrow, scales, row, wide * width + columns, inside)
        total += x
    tl.store(parts + program.to(tl.int64) * width + columns, total, mask=inside)


def _outputs(rows: int, width: int, device: torch.device, each: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    block = triton.next_power_of_2(width)
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=device)
    return values, scales, {"BLOCK": block, "num_warps": min(32, max(4, block // 32 // each))}


def _parts(rows: int, width: int, device: torch.device, warps: int) -> Tensor:
    count = min(rows, programs(device, each=max(1, WARPS_OF_SUMS // warps)))
    return torch.empty((1, count, width), dtype=torch.float32, device=device)


def rows_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) in e4m3, and the scale of each row, float32 (M, 1)."""
    x = x.contiguous()
    rows, width = x.shape
    values, scales, options = _outputs(rows, width, x.device, EACH)
    with torch.cuda.device_of(x):
        rows_kernel[(rows,)](x, values, scales, width, **options)
    return values, scales


def bias_gelu_fp8(z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(z + bias) of z (M, W)."""
    rows, width = z.shape
    values, scales, options = _outputs(rows, width, z.device, EACH)
    with torch.cuda.device_of(z):
        gelu_kernel[(rows,)](z.contiguous(), bias, values, scales, width, **options)
    return values, scales


def bias_gelu_fp8_backward(d_out: Tensor, z: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of z, and the bias's, float32."""
    rows, width = z.shape
    values, scales, options = _outputs(rows, width, z.device, EACH_OF_SUMS)
    parts = _parts(rows, width, z.device, options["num_warps"])
    with torch.cuda.device_of(z):
        gelu_backward_kernel[(parts.shape[1],)](
            d_out.contiguous(), z.contiguous(), bias, values, scales, parts, rows, width, **options
        )
        return values, scales, sum_rows(parts)[0]


def join_fp8(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(a | b | c) of (M, A), (M, B) and (M, B), and the sums of its columns in `dtype`, added up in float32."""
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    (rows, a_width), b_width = a.shape, b.shape[1]
    width = a_width + 2 * b_width
    values, scales, options = _outputs(rows, width, a.device, EACH_OF_SUMS)
    parts = _parts(rows, width, a.device, options["num_warps"])
    with torch.cuda.device_of(a):
        join_kernel[(parts.shape[1],)](a, b, c, values, scales, parts, rows, a_width, b_width, width, **options)
        return values, scales, sum_rows(parts, dtype)[0]
