"""Three gradients side by side in one matrix, and the sums of its columns, in one pass.

PyTorch has two kernels there, which read the gradients twice. Import this file only where the kernel is taken; it
imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.columns import programs, sum_rows

ROWS, COLUMNS = 4, 512  # of a tile
EACH = 6  # programs on a multiprocessor
WARPS = 4


@triton.jit
def join_kernel(
    a,  # (rows, a_width)
    b,  # (rows, b_width)
    c,  # (rows, b_width)
    out,  # (rows, width), width = a_width + 2 b_width
    parts,  # (programs, width) float32
    rows,
    a_width,
    b_width,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A column of tiles of one of the three: every programs-th, from this program's number on."""
    which = tl.program_id(2)
    program, count = tl.program_id(1), tl.num_programs(1)
    source, own, first_column = a, a_width, 0
    if which == 1:
        source, own, first_column = b, b_width, a_width
    elif which == 2:
        source, own, first_column = c, b_width, a_width + b_width
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < own
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(program * ROWS, rows, count * ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        x = tl.load(source + row.to(tl.int64)[:, None] * own + columns[None, :], mask=there, other=0.0)
        tl.store(out + row.to(tl.int64)[:, None] * width + first_column + columns[None, :], x, mask=there)
        total += x.to(tl.float32)
    tl.store(parts + program * width + first_column + columns, tl.sum(total, axis=0), mask=inside)


def join(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a | b | c) of (…, A), (…, B) and (…, B), and the sums of its columns in `dtype`, added up in float32."""
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    widths = a.shape[-1], b.shape[-1]
    width, rows = widths[0] + 2 * widths[1], a.numel() // widths[0]
    out = torch.empty((*a.shape[:-1], width), dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(max(widths), COLUMNS)
    count = max(1, min(triton.cdiv(rows, ROWS), programs(a.device, each=EACH) // (3 * tiles)))
    parts = torch.empty((1, count, width), dtype=torch.float32, device=a.device)
    with torch.cuda.device_of(a):
        join_kernel[(tiles, count, 3)](
            *(a, b, c, out, parts, rows, *widths, width), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
        sums = sum_rows(parts, dtype)[0]
    return out, sums
