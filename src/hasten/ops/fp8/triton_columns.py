"""The columns of two FP8 matrices as rows, for a product whose sum runs over their rows.

Import this file only where the kernels are taken; it imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 128, 64, 4  # of a tile


@triton.jit
def bytes_kernel(x, out, scales, other_scales, parts, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of x (rows, width) to out (width, rows), as bytes. parts: the largest product of scales in each block of
    rows.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    tile = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0)
    tl.store(
        out + column.to(tl.int64)[:, None] * rows + row[None, :],
        tl.trans(tile),
        mask=(column < width)[:, None] & (row < rows)[None, :],
    )
    if tl.program_id(0) == 0:
        both = tl.load(scales + row, mask=row < rows, other=0.0) * tl.load(
            other_scales + row, mask=row < rows, other=0.0
        )
        tl.store(parts + tl.program_id(1), tl.max(both, axis=0))


@triton.jit
def moved_kernel(
    x,  # (rows, width) e4m3
    out,  # (width, rows)
    scales,  # (rows,)
    other_scales,  # (rows,)
    parts,  # (count,)
    found,  # [0]: the scale of out; [4]: 1
    count,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The same for numbers that are multiplied with both scales of their row, under one scale for all."""
    part = tl.arange(0, PARTS)
    top = tl.max(tl.load(parts + part, mask=part < count, other=0.0), axis=0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    both = tl.load(scales + row, mask=row < rows, other=0.0) * tl.load(other_scales + row, mask=row < rows, other=0.0)
    tile = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
    moved = (tile.to(tl.float32) * (both * (1.0 / top))[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + column.to(tl.int64)[:, None] * rows + row[None, :],
        tl.trans(moved),
        mask=(column < width)[:, None] & (row < rows)[None, :],
    )
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(found, top)
        tl.store(found + 4, 1.0)


def columns(dy: Tensor, dy_scales: Tensor, x: Tensor, x_scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dy (M, N) with the scales of both, (N, M); x (M, K) without, (K, M); and their scales at [0] and [4]."""
    rows, device = len(x), x.device
    blocks = triton.cdiv(rows, ROWS)
    by_x, by_dy = x.new_empty((x.shape[1], rows)), x.new_empty((dy.shape[1], rows))
    parts = torch.empty(blocks, dtype=torch.float32, device=device)
    found = torch.empty(8, dtype=torch.float32, device=device)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    with torch.cuda.device_of(x):
        bytes_kernel[(triton.cdiv(by_x.shape[0], COLUMNS), blocks)](
            *(x.view(torch.uint8), by_x.view(torch.uint8), x_scales, dy_scales, parts, rows, by_x.shape[0]),
            **tile,
        )
        moved_kernel[(triton.cdiv(by_dy.shape[0], COLUMNS), blocks)](
            *(dy, by_dy, dy_scales, x_scales, parts, found, blocks, rows, by_dy.shape[0]),
            PARTS=triton.next_power_of_2(blocks),
            **tile,
        )
    return by_dy, by_x, found
