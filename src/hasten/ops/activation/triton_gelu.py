"""bias_gelu in Triton: one pass forward, one backward that also leaves the sums for the bias's gradient.

Import this file only where the kernel is taken; it imports Triton and registers the operators.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.columns import programs, sum_rows

ROWS, COLUMNS = 4, 512  # of a tile
EACH = 6  # programs of the backward pass on a multiprocessor
WARPS = 4


@triton.jit
def gate(x):
    """The sigmoid s of 2u in gelu(x) = x·s, and the derivative of 2u; u = sqrt(2/π)·(x + 0.044715 x³)."""
    square = x * x
    s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
    return s, 1.5957691216057308 * (1.0 + 0.134145 * square)


@triton.jit
def forward_kernel(z, bias, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of ROWS x COLUMNS."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    places = row.to(tl.int64)[:, None] * width + columns[None, :]
    x = tl.load(z + places, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    s, _ = gate(x)
    tl.store(out + places, (x * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(d_out, z, bias, dz, parts, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A column of tiles: every programs-th, from this program's number on."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program, count = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    b = tl.zeros((COLUMNS,), tl.float32)
    if bias is not None:
        b = tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    for first in range(program * ROWS, rows, count * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < width)[None, :]
        places = row.to(tl.int64)[:, None] * width + columns[None, :]
        x = tl.load(z + places, mask=inside, other=0.0).to(tl.float32) + b[None, :]
        dy = tl.load(d_out + places, mask=inside, other=0.0).to(tl.float32)
        s, slope = gate(x)
        dx = dy * (s + x * s * (1.0 - s) * slope)
        tl.store(dz + places, dx.to(dz.dtype.element_ty), mask=inside)
        total += dx
    tl.store(parts + program.to(tl.int64) * width + columns, tl.sum(total, axis=0), mask=columns < width)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


@torch.library.custom_op("hasten_triton::bias_gelu", mutates_args=())
def bias_gelu(z: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(z + bias), tanh form, of z (..., W); computed in float32 and rounded once."""
    z = z.contiguous()
    out, width = torch.empty_like(z), z.shape[-1]
    grid = (triton.cdiv(width, COLUMNS), triton.cdiv(_rows(z), ROWS))
    with torch.cuda.device_of(z):
        forward_kernel[grid](z, bias, out, _rows(z), width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return out


@torch.library.custom_op("hasten_triton::bias_gelu_backward", mutates_args=())
def backward_operator(d_out: Tensor, z: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of z and, in float32, of the bias."""
    d_out, z = d_out.contiguous(), z.contiguous()
    dz, width = torch.empty_like(z), z.shape[-1]
    wide = triton.cdiv(width, COLUMNS)
    count = max(1, min(triton.cdiv(_rows(z), ROWS), programs(z.device, each=EACH) // wide))
    parts = torch.empty((1, count, width), dtype=torch.float32, device=z.device)
    with torch.cuda.device_of(z):
        backward_kernel[(wide, count)](
            *(d_out, z, bias, dz, parts, _rows(z), width), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
        total = sum_rows(parts)[0]
    return dz, total


@bias_gelu.register_fake
def _(z: Tensor, bias: Tensor | None) -> Tensor:
    return z.new_empty(z.shape)


@backward_operator.register_fake
def _(d_out: Tensor, z: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    z, bias = ctx.saved_tensors
    dz, dbias = backward_operator(d_out, z, bias)
    return dz, None if bias is None else dbias.to(bias.dtype)


bias_gelu.register_autograd(_backward, setup_context=_save)
