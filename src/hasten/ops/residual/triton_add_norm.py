"""add_norm in Triton: a row is read once, added, normalised and written; backward the same, with all gradients.

The backward pass has a fixed number of programs. Each walks over its rows and keeps the sums over rows (the gradients
of the norm's weight and bias and of the branch's bias) in registers; a second kernel adds the programs' sums up.
PyTorch's way has five kernels there: the norm's, the cast of the stream's gradient, and three sums.

Import this file only where the kernel is taken; it imports Triton and registers the operators.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.columns import programs, sum_rows
from hasten.ops.residual.norm import Norm
from hasten.ops.triton_fp8 import store_rounded

EACH = 6  # programs of the backward pass on a multiprocessor
SUMS = 3  # kept by each: weight, bias, the branch's bias


def warps_of(block: int) -> int:
    """8 numbers a thread, from 4 warps on."""
    return min(16, max(4, block // 256))


@triton.jit
def normalize(x, weight, bias, columns, inside, width, eps, offset, CENTRED: tl.constexpr):
    """The norm of a row in float32, its mean (0 where it is not centred) and 1/std or 1/rms."""
    mean = 0.0
    if CENTRED:
        mean = tl.sum(x, axis=0) / width
        x = tl.where(inside, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    y = x * scale * (tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return y, mean, scale


@triton.jit
def forward_kernel(
    stream,  # (rows, width) float32
    branch,  # (rows, width)
    branch_bias,  # (width,) or None
    weight,  # (width,)
    bias,  # (width,) or None
    total,  # (rows, width) float32
    normed,  # (rows, width), or None
    narrow,  # the same in FP8, or None
    narrow_scales,  # (rows,) float32
    means,  # (rows,) float32
    scales,  # (rows,) float32: 1/std, or 1/rms
    width,
    eps,
    offset,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    x = tl.load(stream + places, mask=inside, other=0.0)
    added = tl.load(branch + places, mask=inside, other=0.0).to(tl.float32)
    if branch_bias is not None:
        added += tl.load(branch_bias + columns, mask=inside, other=0.0).to(tl.float32)
    x += added
    tl.store(total + places, x, mask=inside)
    y, mean, scale = normalize(x, weight, bias, columns, inside, width, eps, offset, CENTRED)
    if normed is not None:
        tl.store(normed + places, y.to(normed.dtype.element_ty), mask=inside)
    if narrow is not None:
        store_rounded(y, narrow, narrow_scales, row, places, inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def backward_kernel(
    d_total,  # (rows, width) float32, or None: nobody used the stream
    d_normed,  # (rows, width)
    total,  # (rows, width) float32
    means,  # (rows,)
    scales,  # (rows,)
    weight,  # (width,)
    d_stream,  # (rows, width) float32
    d_branch,  # (rows, width), or None
    narrow,  # the same in FP8, or None
    narrow_scales,  # (rows,) float32
    parts,  # (3, programs, width) float32
    rows,
    width,
    offset,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every programs-th row, from this program's number on."""
    program, count = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    by_weight = tl.zeros((BLOCK,), tl.float32)
    by_bias = tl.zeros((BLOCK,), tl.float32)
    by_branch = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, count):
        places = tl.cast(row, tl.int64) * width + columns
        dy = tl.load(d_normed + places, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(total + places, mask=inside, other=0.0)
        scale = tl.load(scales + row)
        if CENTRED:
            x -= tl.load(means + row)
        normal = tl.where(inside, x * scale, 0.0)
        by_weight += dy * normal
        by_bias += dy
        g = dy * w
        along = tl.sum(g * normal, axis=0) / width
        dx = g - normal * along
        if CENTRED:
            dx -= tl.sum(g, axis=0) / width
        dx *= scale
        if d_total is not None:
            dx += tl.load(d_total + places, mask=inside, other=0.0)
        tl.store(d_stream + places, dx, mask=inside)
        if d_branch is not None:
            tl.store(d_branch + places, dx.to(d_branch.dtype.element_ty), mask=inside)
        if narrow is not None:
            store_rounded(tl.where(inside, dx, 0.0), narrow, narrow_scales, row, places, inside)
        by_branch += dx
    place = program.to(tl.int64) * width + columns
    step = count.to(tl.int64) * width
    tl.store(parts + place, by_weight, mask=inside)
    tl.store(parts + step + place, by_bias, mask=inside)
    tl.store(parts + 2 * step + place, by_branch, mask=inside)


def add_norm(
    stream: Tensor, branch: Tensor, branch_bias: Tensor | None, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add a branch to a float32 stream and normalize it, as the reference does."""
    total, normed, _, _ = operator(
        stream, branch, branch_bias, norm.weight, norm.bias, norm.eps, norm.offset, norm.centred, dtype
    )
    return total, normed


@torch.library.custom_op("hasten_triton::add_norm", mutates_args=())
def operator(
    stream: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new stream, its norm, and the mean and 1/std (or 1/rms) of each row."""
    norm, normed = Norm(weight, bias, eps, offset, centred), torch.empty_like(stream, dtype=dtype)
    total, means, scales = added(stream, branch, branch_bias, norm, normed)
    return total, normed, means, scales


def added(
    stream: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    norm: Norm,
    normed: Tensor | None,
    narrow: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new stream, and the mean and 1/std (or 1/rms) of each row; its norm is written to normed and, in FP8 with
    the scales of rows, to narrow.
    """
    stream, branch = stream.contiguous(), branch.contiguous()
    width = stream.shape[-1]
    rows = stream.numel() // width
    total = torch.empty_like(stream)
    means = torch.empty(rows, dtype=torch.float32, device=stream.device)
    scales = torch.empty_like(means)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(stream):
        forward_kernel[(rows,)](
            *(
                stream,
                branch,
                branch_bias,
                norm.weight,
                norm.bias,
                total,
                normed,
                *(narrow or (None, None)),
                means,
                scales,
            ),
            *(width, norm.eps, norm.offset),
            CENTRED=norm.centred,
            BLOCK=block,
            num_warps=warps_of(block),
        )
    return total, means, scales


@torch.library.custom_op("hasten_triton::add_norm_backward", mutates_args=())
def backward_operator(
    d_total: Tensor | None,
    d_normed: Tensor,
    total: Tensor,
    means: Tensor,
    scales: Tensor,
    weight: Tensor,
    offset: float,
    centred: bool,
    branch_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the stream and the branch, and the three sums over rows (3, width)."""
    d_branch = torch.empty_like(total, dtype=branch_dtype)
    d_stream, sums = gradients(d_total, d_normed, total, means, scales, weight, offset, centred, d_branch)
    return d_stream, d_branch, sums


def gradients(
    d_total: Tensor | None,
    d_normed: Tensor,
    total: Tensor,
    means: Tensor,
    scales: Tensor,
    weight: Tensor,
    offset: float,
    centred: bool,
    d_branch: Tensor | None,
    narrow: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the stream, also written to d_branch and, in FP8 with the scales of rows, to narrow; the sums."""
    width = total.shape[-1]
    rows = total.numel() // width
    d_total = None if d_total is None else d_total.contiguous()
    d_stream = torch.empty_like(total)
    count = min(rows, programs(total.device, each=EACH))
    parts = torch.empty((SUMS, count, width), dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(total):
        backward_kernel[(count,)](
            *(
                d_total,
                d_normed.contiguous(),
                total,
                means,
                scales,
                weight,
                d_stream,
                d_branch,
                *(narrow or (None, None)),
                parts,
            ),
            *(rows, width, offset),
            CENTRED=centred,
            BLOCK=block,
            num_warps=warps_of(block),
        )
        sums = sum_rows(parts)
    return d_stream, sums


@operator.register_fake
def _(
    stream: Tensor,
    branch: Tensor,
    branch_bias: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    offset: Any,
    centred: Any,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = stream.numel() // stream.shape[-1]
    row = stream.new_empty(rows, dtype=torch.float32)
    return stream.new_empty(stream.shape), stream.new_empty(stream.shape, dtype=dtype), row, torch.empty_like(row)


@backward_operator.register_fake
def _(
    d_total: Any,
    d_normed: Any,
    total: Tensor,
    means: Any,
    scales: Any,
    weight: Any,
    offset: Any,
    centred: Any,
    branch_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    narrow = total.new_empty(total.shape, dtype=branch_dtype)
    return total.new_empty(total.shape), narrow, total.new_empty((SUMS, total.shape[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _stream, branch, branch_bias, weight, bias, _, offset, centred, _ = inputs
    total, _, means, scales = output
    ctx.save_for_backward(total, means, scales, weight)
    ctx.options = (offset, centred, branch.dtype)
    ctx.dtypes = (None if branch_bias is None else branch_bias.dtype, None if bias is None else bias.dtype)
    ctx.mark_non_differentiable(means, scales)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    total, means, scales, weight = ctx.saved_tensors
    offset, centred, branch_dtype = ctx.options
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    d_stream, d_branch, sums = backward_operator(
        d_total, d_normed, total, means, scales, weight, offset, centred, branch_dtype
    )
    by_branch, by_bias = ctx.dtypes
    return (
        d_stream,
        d_branch,
        None if by_branch is None else sums[2].to(by_branch),
        sums[0].to(weight.dtype),
        None if by_bias is None else sums[1].to(by_bias),
        *(None,) * 4,
    )


operator.register_autograd(_backward, setup_context=_save)
