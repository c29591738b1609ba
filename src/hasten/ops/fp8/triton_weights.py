"""Matrices in FP8 with one scale each, and their columns: all of a model in two kernels.

A program has a tile of one parameter; tables of addresses say which. The second kernel moves bytes: where one kernel
stores rounded pairs whole and takes them apart for the transpose, ptxas 12.8 (Triton 3.6) reads the second byte of a
pair before it is written. Import this file only where the kernels are taken; it imports Triton.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.triton_fp8 import scale_of

ROWS, COLUMNS, WARPS = 64, 128, 8  # of a tile
FIELDS = 9  # of a parameter in the table: below


@triton.jit
def tile_of(table, blocks, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The program's row of the table, the rows and columns of its tile, and which of them there are."""
    program = tl.program_id(0)
    own = table + tl.load(blocks + 3 * program) * FIELDS
    row = tl.multiple_of(tl.load(blocks + 3 * program + 1), 16) + tl.arange(0, ROWS)
    column = tl.multiple_of(tl.load(blocks + 3 * program + 2), 16) + tl.arange(0, COLUMNS)
    there = row < tl.multiple_of(tl.load(own + 5), 16)
    beside = column < tl.multiple_of(tl.load(own + 6), 16)
    return own, row, column, there, beside


@triton.jit
def rows_kernel(
    table,  # (parameters, FIELDS) int64: addresses of weight, rows, columns, scales and largest; n, K, N, the first row
    blocks,  # (programs, 3) int64: whose numbers, first row and column of the tile
    DTYPE: tl.constexpr,
    NARROW: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of a parameter (n, K) in a matrix (N, K), whose rows it has from `first` on; and the matrix's scale, once
    for each row of it and of its transpose.
    """
    own, row, column, there, beside = tile_of(table, blocks, FIELDS, ROWS, COLUMNS)
    k, first = tl.multiple_of(tl.load(own + 6), 16), tl.multiple_of(tl.load(own + 8), 16)
    inside = there[:, None] & beside[None, :]
    weight = tl.multiple_of(tl.load(own).to(tl.pointer_type(DTYPE)), 16)
    w = tl.load(weight + row[:, None] * k + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.load(tl.load(own + 4).to(tl.pointer_type(tl.float32))))
    rows = tl.multiple_of(tl.load(own + 1).to(tl.pointer_type(NARROW)), 16)
    tl.store(rows + (first + row)[:, None] * k + column[None, :], (w * (1.0 / scale)).to(NARROW), mask=inside)
    scales = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    tl.store(scales + first + row, scale + tl.zeros((ROWS,), tl.float32), mask=there)
    tl.store(scales + column, scale + tl.zeros((COLUMNS,), tl.float32), mask=beside)


@triton.jit
def columns_kernel(table, blocks, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of the matrix's rows, as bytes, in its transpose (K, N)."""
    own, row, column, there, beside = tile_of(table, blocks, FIELDS, ROWS, COLUMNS)
    k, total = tl.multiple_of(tl.load(own + 6), 16), tl.multiple_of(tl.load(own + 7), 16)
    row += tl.multiple_of(tl.load(own + 8), 16)
    rows = tl.multiple_of(tl.load(own + 1).to(tl.pointer_type(tl.uint8)), 16)
    tile = tl.load(rows + row[:, None] * k + column[None, :], mask=there[:, None] & beside[None, :], other=0)
    columns = tl.multiple_of(tl.load(own + 2).to(tl.pointer_type(tl.uint8)), 16)
    tl.store(columns + column[:, None] * total + row[None, :], tl.trans(tile), mask=beside[:, None] & there[None, :])


class Forms(NamedTuple):
    """Where those of a matrix (N, K) go: rows (N, K), columns (K, N), max(N, K) scales; largest: (1,), read."""

    rows: Tensor
    columns: Tensor
    scales: Tensor
    largest: Tensor


class Table:
    """groups: parameters (n, K) at fixed addresses, whose rows follow each other in a matrix; forms: of each matrix."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], forms: Sequence[Forms]) -> None:
        fields: list[list[int]] = []
        blocks: list[tuple[int, int, int]] = []
        for members, made in zip(groups, forms, strict=True):
            first = 0
            for weight in members:
                n, k = weight.shape
                places = [(len(fields), row, column) for row in range(0, n, ROWS) for column in range(0, k, COLUMNS)]
                blocks += places
                addresses = [one.data_ptr() for one in (weight, *made)]
                fields.append([*addresses, n, k, len(made.rows), first])
                first += n
        device = groups[0][0].device
        self.fields = torch.tensor(fields, dtype=torch.int64).to(device)
        self.blocks = torch.tensor(blocks, dtype=torch.int64).to(device)
        dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
        self.dtype = dtypes[groups[0][0].dtype]

    def round(self) -> None:
        """Write the forms of the weights as they are now."""
        sizes = {"FIELDS": FIELDS, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
        with torch.cuda.device_of(self.fields):
            grid, given = (len(self.blocks),), (self.fields, self.blocks)
            rows_kernel[grid](*given, DTYPE=self.dtype, NARROW=tl.float8e4nv, **sizes)
            columns_kernel[grid](*given, **sizes)
