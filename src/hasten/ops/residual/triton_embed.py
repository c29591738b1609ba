"""Embeddings and the first norm in one pass, in Triton; and the embedding's gradient, added to what is there already.

Import this file only where the kernels are taken; it imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.residual.norm import Norm
from hasten.ops.residual.triton_add_norm import normalize, warps_of


@triton.jit
def embed_kernel(
    tokens,  # (rows,) int64
    table,  # (entries, width) float32
    positions,  # (period,) int64, or None
    position_table,  # (…, width) float32, or None
    weight,  # (width,)
    bias,  # (width,) or None
    total,  # (rows, width) float32
    normed,  # (rows, width)
    means,  # (rows,) float32
    scales,  # (rows,) float32
    entries,
    period,
    width,
    eps,
    offset,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; a token that is none reads zeros."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < entries)
    x = tl.load(table + token * width + columns, mask=inside & known, other=0.0)
    if positions is not None:
        position = tl.load(positions + row % period)
        x += tl.load(position_table + position * width + columns, mask=inside, other=0.0)
    places = row.to(tl.int64) * width + columns
    tl.store(total + places, x, mask=inside)
    y, mean, scale = normalize(x, weight, bias, columns, inside, width, eps, offset, CENTRED)
    tl.store(normed + places, y.to(normed.dtype.element_ty), mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def scatter_kernel(tokens, d_stream, gradient, entries, width, BLOCK: tl.constexpr):
    """gradient[tokens[row]] += d_stream[row], in any order; all float32."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < entries)
    x = tl.load(d_stream + row.to(tl.int64) * width + columns, mask=inside, other=0.0)
    tl.atomic_add(gradient + token * width + columns, x, mask=inside & known, sem="relaxed")


def embed_norm(
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    position_table: Tensor | None,
    norm: Norm,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream (…, C) of tokens, its norm, and the mean and 1/std (or 1/rms) of each row; not differentiable."""
    width = table.shape[1]
    total = torch.empty((*tokens.shape, width), dtype=torch.float32, device=table.device)
    normed = torch.empty_like(total, dtype=dtype)
    means = torch.empty(tokens.numel(), dtype=torch.float32, device=table.device)
    scales = torch.empty_like(means)
    block = triton.next_power_of_2(width)
    period = 1 if positions is None else positions.numel()
    with torch.cuda.device_of(table):
        embed_kernel[(tokens.numel(),)](
            *(tokens.contiguous(), table, positions, position_table, norm.weight, norm.bias),
            *(total, normed, means, scales, table.shape[0], period, width, norm.eps, norm.offset),
            CENTRED=norm.centred,
            BLOCK=block,
            num_warps=warps_of(block),
        )
    return total, normed, means, scales


def scatter(gradient: Tensor, tokens: Tensor, d_stream: Tensor) -> None:
    """Add the rows of d_stream (…, C) to those of the gradient that their tokens name."""
    entries, width = gradient.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(gradient):
        scatter_kernel[(tokens.numel(),)](
            *(tokens.contiguous(), d_stream.contiguous(), gradient, entries, width),
            BLOCK=block,
            num_warps=warps_of(block),
        )
