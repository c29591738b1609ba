"""The linear product on CUDA: Triton for up to 16 rows, PyTorch's product of the dequantized weight for more.

Import this file only where the kernel is taken; it imports Triton and registers the operator.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from hasten.ops.linear import triton_kernels as kernels
from hasten.ops.linear.layouts import PIECE, Operands
from hasten.ops.linear.weights import WeightFormat, group_format

MOST_ROWS = 16  # the smallest side of a tensor core's tile: as many rows cost what one does
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """How one product is cut: `block_n` outputs a program, `block_j` bytes of each a step, K into `splits` parts."""

    block_n: int
    block_j: int
    splits: int
    warps: int = 4
    stages: int = 3


# Programs that a product is cut into, at least: enough bytes under way for the memory's latency on the 132
# multiprocessors of a Hopper GPU. A constant, so that results do not depend on the device.
PROGRAMS_ONE_ROW = 1000
PROGRAMS_FEW_ROWS = 528
MOST_SPLITS = {True: 8, False: 16}  # for one row, for several


def choose(rows: int, out_features: int, group_bytes: int, bits: int = 8) -> Config:
    """The configuration for a product of so many rows and outputs; group_bytes: of a group of weights, 0: of a row.

    For one row the fastest of `gpu_session.py kernels --tune` on an H100, over two sizes: 1,024 bytes a step, by few
    threads where each byte has two weights to be spread.
    """
    one = rows == 1
    block_j = group_bytes or (64 if one else 128)  # a step is a group
    # Several rows: 16 bytes a step for each thread of 4 warps; the tensor cores' tile has 64 rows of weights.
    block_n = 1024 // block_j if one else max(64, 2048 // block_j)
    tiles = triton.cdiv(out_features, block_n)
    wanted = PROGRAMS_ONE_ROW if one else PROGRAMS_FEW_ROWS
    splits = 1
    while splits < MOST_SPLITS[one] and tiles * splits < wanted:
        splits *= 2
    return Config(
        block_n=block_n,
        block_j=block_j,
        splits=splits,
        warps=1 if one and bits == 4 else 4,
        stages=4 if one else 3,
    )


def linear(x: Tensor, weight: Operands) -> Tensor:
    """A `Product` (operator.py) of x (…, K) bfloat16 or float16. Activations are never rounded, whatever `planes`."""
    parts = weight.data, weight.scales, weight.zeros, weight.bias, weight.out_features
    return linear_operator(x, *parts, weight.format.bits, weight.format.group_size)


@torch.library.custom_op("hasten_triton::linear", mutates_args=())
def linear_operator(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
) -> Tensor:
    """x (…, K), data (pieces, N, 16), scales (G, N), zeros (G, N), bias (N,) -> (…, N).

    torch.library wants every tensor named: only here the fields of `Operands` stand one by one.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], out_features))
    run = few_rows if rows.shape[0] <= MOST_ROWS else many_rows
    format = group_format(f"int{bits}", group_size)  # zeros and scales speak for themselves
    y = run(rows, Operands(data, scales, zeros, None, bias, out_features, format))
    return y.view(*x.shape[:-1], out_features)


@linear_operator.register_fake
def _fake(x: Tensor, data: Any, scales: Any, zeros: Any, bias: Any, out_features: int, *rest: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def few_rows(x: Tensor, weight: Operands, *, config: Config | None = None) -> Tensor:
    """x (R, K), R from 1 to 16 -> (R, N). `config` is for tuning; that of `choose` by default."""
    rows, k = x.shape
    n = weight.out_features
    format = weight.format
    config = config or choose(rows, n, _group_bytes(format), format.bits)
    pieces = weight.data.shape[0]
    steps = triton.cdiv(pieces, config.block_j // PIECE)
    steps_per_split = triton.cdiv(steps, min(config.splits, steps))
    splits = triton.cdiv(steps, steps_per_split)
    y = _result(x, rows, n)
    parts = y if splits == 1 else x.new_empty((splits, rows, n), dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernels.product[(triton.cdiv(n, config.block_n), splits)](
            *(x, weight.data, weight.scales, weight.zeros, weight.bias if splits == 1 else None, parts),
            *(rows, n, k, pieces, steps_per_split),
            BITS=format.bits,
            GROUPED=format.group_size > 0,
            ONE_ROW=rows == 1,
            M=1 if rows == 1 else MOST_ROWS,
            BLOCK_N=config.block_n,
            BLOCK_J=config.block_j,
            STAGES=config.stages,
            WIDE=x.device.type == "cpu",
            num_warps=config.warps,
        )
        if splits > 1:
            grid = (triton.cdiv(y.numel(), SUM_BLOCK),)
            kernels.add_splits[grid](parts, weight.bias, y, y.numel(), n, SPLITS=splits, BLOCK=SUM_BLOCK)
    return y.to(x.dtype)


def many_rows(x: Tensor, weight: Operands) -> Tensor:
    """x (R, K) -> (R, N): the weight becomes 16-bit for the time of the product, which then is PyTorch's own.

    torch._int_mm would be twice as fast, but needs x rounded to int8; this kernel promises not to round it.
    """
    n, k, format = weight.out_features, x.shape[1], weight.format
    plain = _result(x, n, k)
    block_j = _group_bytes(format) or 64
    grid = (triton.cdiv(n, 32), triton.cdiv(weight.data.shape[0], block_j // PIECE))
    with torch.cuda.device_of(x):
        kernels.dequantize[grid](
            *(weight.data, weight.scales, weight.zeros, plain, n, k),
            BITS=format.bits,
            GROUPED=format.group_size > 0,
            BLOCK_N=32,
            BLOCK_J=block_j,
        )
    plain = plain.to(x.dtype)
    if format.group_size:
        return F.linear(x, plain, None if weight.bias is None else weight.bias.to(x.dtype))
    assert weight.scales is not None
    y = F.linear(x, plain) * weight.scales.flatten()
    return (y if weight.bias is None else y + weight.bias).to(x.dtype)


def _group_bytes(format: WeightFormat) -> int:
    return format.group_size * format.bits // 8


def _result(x: Tensor, *size: int) -> Tensor:
    """What a kernel writes to. Triton's interpreter cuts bfloat16 off where a GPU rounds: there it writes float32."""
    return x.new_empty(size, dtype=torch.float32 if x.device.type == "cpu" else x.dtype)
