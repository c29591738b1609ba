"""Sums over rows, the second of two passes: programs leave partial sums, one kernel adds them up in a fixed order.

Import this file only where a Triton kernel is taken; it imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, ROWS = 32, 128


@triton.jit
def add_rows(parts, out, rows, width, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """out[j, column] = sum over rows of parts[j, row, column], float32; out in any dtype."""
    j = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        places = (j * rows + row)[:, None] * width + columns[None, :]
        total += tl.load(parts + places, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
    tl.store(out + j * width + columns, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=inside)


def sum_rows(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(J, P, C) float32 -> (J, C), rounded once."""
    j, rows, width = parts.shape
    out = torch.empty((j, width), dtype=dtype, device=parts.device)
    add_rows[(triton.cdiv(width, COLUMNS), j)](parts, out, rows, width, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=8)
    return out


def programs(device: torch.device, *, each: int) -> int:
    """Programs of a grid that fills a device with `each` on a multiprocessor; few where Triton is interpreted."""
    if device.type != "cuda":
        return 3
    return each * torch.cuda.get_device_properties(device).multi_processor_count
