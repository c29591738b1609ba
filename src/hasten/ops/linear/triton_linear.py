"""Launches the Triton products: one row, several rows, and what is beside PyTorch's product of 16-bit weights.

Import this file only where a kernel is taken; it imports Triton and registers the operators.
"""

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from hasten.ops.linear import gemm_hopper, triton_rows
from hasten.ops.linear.beside import NormArguments
from hasten.ops.linear.layouts import Operands
from hasten.ops.linear.triton_choice import (
    MOST_FEW_ROWS,
    MOST_UNPACKED_ROWS,
    FewRows,
    OneRow,
    SeveralRows,
    choose_few_rows,
    choose_one_row,
    choose_several_rows,
    norm_apart,
    serves_few_rows,
)
from hasten.ops.linear.triton_few import few_rows
from hasten.ops.linear.triton_gemm import several_rows
from hasten.ops.linear.triton_gemv import one_row_packed, one_row_plain
from hasten.ops.linear.triton_norm import normed_rows
from hasten.ops.linear.weights import BFLOAT16, group_format
from hasten.ops.triton_support import early_start, readable
from hasten.ops.wide_sums import add_product

ONE = 0x3F800000  # the bits of 1.0
ELEMENTS = 512  # of a program of an elementwise kernel, 8 of a thread
MOST_ROWS_TO_ADD = 16  # up to here a launch of its own for the sum costs little


@dataclass(frozen=True, slots=True)
class Beside:
    """What is computed beside a product: the norm of x before it, then an activation by number, gating, a residual."""

    dtype: torch.dtype  # of 16 bits
    norm: NormArguments | None = None
    activation: int = 0
    gated: bool = False
    residual: Tensor | None = None

    def outputs(self, weight: Operands) -> int:
        """How many each row of x has."""
        return weight.out_features // 2 if self.gated else weight.out_features

    @property
    def result(self) -> torch.dtype:
        """dtype of the result."""
        return self.dtype if self.residual is None else torch.float32


def linear(x: Tensor, weight: Operands) -> Tensor:
    """A `Product` (operator.py) of x (…, K) bfloat16 or float16.

    Where `planes` allows it, many rows are rounded to int8 for a weight of int8 with one scale a row (gemm_hopper.py).
    """
    parts = weight.data, weight.scales, weight.zeros, weight.bias, weight.out_features
    return linear_operator(x, *parts, weight.format.bits, weight.format.group_size, weight.planes)


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
    planes: int,
) -> Tensor:
    """x (…, K) and a weight in the "chunks" layout (layouts.py) -> (…, N).

    torch.library wants each tensor as an argument of its own, so here the fields of `Operands` are separate.
    """
    weight = _operands(data, scales, zeros, bias, out_features, bits, group_size, planes)
    y = product(x.reshape(-1, x.shape[-1]), weight, Beside(x.dtype))
    return y.view(*x.shape[:-1], out_features)


@linear_operator.register_fake
def _fake(x: Tensor, data: Any, scales: Any, zeros: Any, bias: Any, out_features: int, *rest: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("hasten_triton::fused_linear", mutates_args=())
def fused_operator(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    planes: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    offset: float,
    centred: bool,
    activation: int,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`fused_linear` (fused.py), its arguments one by one. A plain weight has 16 bits."""
    norm = None if norm_weight is None else NormArguments(norm_weight, norm_bias, eps, offset, centred)
    weight = _operands(data, scales, zeros, bias, out_features, bits, group_size, planes)
    return product(x, weight, Beside(dtype, norm, activation, gated, residual))


@fused_operator.register_fake
def _fake_fused(x: Tensor, data: Any, scales: Any, zeros: Any, bias: Any, out_features: int, *rest: Any) -> Tensor:
    gated, residual, dtype = rest[-3:]
    outputs = out_features // 2 if gated else out_features
    return x.new_empty((x.shape[0], outputs), dtype=dtype if residual is None else torch.float32)


def _operands(
    data: Tensor, scales: Any, zeros: Any, bias: Any, n: int, bits: int, group_size: int, planes: int
) -> Operands:
    format = BFLOAT16 if bits == 16 else group_format(f"int{bits}", group_size)  # zeros and scales speak for themselves
    return Operands(data, scales, zeros, None, bias, n, format, planes)


def product(x: Tensor, weight: Operands, beside: Beside) -> Tensor:
    """x (R, K) -> (R, outputs): launches as few kernels as there are for this many rows."""
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty((0, beside.outputs(weight)), dtype=beside.result)
    x, norm = x.contiguous(), beside.norm
    if beside.residual is not None and not beside.residual.is_contiguous():
        beside = replace(beside, residual=beside.residual.contiguous())
    if norm is not None and not _one_dtype(norm, beside.dtype):
        beside = replace(beside, norm=norm._replace(weight=norm.weight.float(), bias=_floats(norm.bias)))
    with torch.cuda.device_of(x):
        packed = weight.format.bits != 16
        # Tensor cores are faster for a row, too, where they get it as it is, and for large weights.
        as_it_is = beside.norm is None and x.dtype == beside.dtype
        alone = packed and (as_it_is or norm_apart(weight.format.bits, weight.out_features, x.shape[1]))
        if rows == 1 and not alone and reads_in_pairs(x, weight, beside):
            return multiply_row(x, weight, beside)
        if packed and rows > MOST_FEW_ROWS and gemm_hopper.rounds(x, weight):
            y = gemm_hopper.multiply(x, weight, beside, _counters)
            if y is not None:
                return y
        if beside.norm is not None:
            x = normed_rows(x, beside.norm, beside.dtype)
        x = x.to(beside.dtype)
        if packed and serves_few_rows(rows, weight.out_features, x.shape[1]):
            return multiply_few(x, weight, beside)
        if packed and gemm_hopper.serves(x, weight):
            y = gemm_hopper.multiply(x, weight, beside, _counters)
            if y is not None:
                return y
        if packed and rows <= MOST_UNPACKED_ROWS:
            return multiply_rows(x, weight, beside)
        if packed:
            weight = dequantized(weight, x.shape[1], beside.dtype)
        return multiply_plain(x, weight, beside)


def reads_in_pairs(x: Tensor, weight: Operands, beside: Beside) -> bool:
    """Whether `multiply_row` can multiply: K is even, of plain weights a multiple of 8, and no 16-bit dtypes differ."""
    plain = weight.format.bits == 16
    own = [x.dtype, weight.data.dtype] if plain else [x.dtype]
    return x.shape[1] % (8 if plain else 2) == 0 and all(one in (torch.float32, beside.dtype) for one in own)


def multiply_row(x: Tensor, weight: Operands, beside: Beside, *, config: OneRow | None = None) -> Tensor:
    """x (1, K) -> (1, outputs) in one launch. `config` is for tuning; that of `choose_one_row` by default."""
    bits, group_size = weight.format.bits, weight.format.group_size
    n, k = weight.out_features, x.shape[1]
    config = config or choose_one_row(bits, group_size, n, k)
    norm, outputs = beside.norm, beside.outputs(weight)
    out = _result(x, beside, 1, outputs)
    side = 1 if bits == 16 else 4
    grid = (triton.cdiv(n, config.block * side),)
    norm_weight = None if norm is None else norm.weight
    kind = 0 if norm is None else 2 if norm.centred else 1
    row = [_pairs(x), _pairs(weight.data) if bits == 16 else weight.data]
    beside_it = [None if own is None else _pairs(own) for own in (norm_weight, None if norm is None else norm.bias)]
    eps, offset = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
    bias = None if weight.bias is None else readable(weight.bias)
    options: dict[str, Any] = {
        "XBITS": 8 * x.itemsize,
        "GBITS": 16 if norm is None else 8 * norm.weight.itemsize,
        "HALF": beside.dtype == torch.float16,
        "NORM": kind,
        "ACTIVATION": beside.activation,
        "GATED": beside.gated,
        "BLOCK": config.block,
        "T": config.threads,
        "num_warps": config.threads // 32,
        "num_stages": config.stages,
    }
    # The weight must be there before the kernel before it ends: a copy made here would not be.
    options |= early_start(x.device, config.early and (bits != 16 or weight.data.is_contiguous()))
    if bits == 16:
        sizes: tuple[int, ...] = (outputs, n, k, k // 2)
        one_row_plain[grid](*row, bias, *beside_it, beside.residual, out, *sizes, eps, offset, **options)
    else:
        packed = (weight.scales, weight.zeros, bias)
        assert weight.scales is not None
        sizes = (outputs, n, k, weight.data.shape[1], weight.scales.shape[1])
        one_row_packed[grid](
            *(*row, *packed, *beside_it, beside.residual, out, *sizes, eps, offset, ONE),
            BITS=bits,
            GROUP=group_size,
            STAGES=config.stages,
            **options,
        )
    return out.to(beside.result)


def multiply_rows(x: Tensor, weight: Operands, beside: Beside, *, config: SeveralRows | None = None) -> Tensor:
    """x (R, K) in 16 bits, R from 1 on -> (R, outputs), through tensor cores; the norm of `beside` has been applied.

    Where K is split, the program that comes last to a tile adds the parts, in their order.
    """
    rows, k = x.shape
    bits, group_size = weight.format.bits, weight.format.group_size
    n, outputs = weight.out_features, beside.outputs(weight)
    config = config or choose_several_rows(bits, group_size, rows, n, k)
    assert weight.scales is not None
    run = (128 if bits == 4 else 64) * config.chunks  # features of a step
    words = weight.data.shape[1]
    steps = triton.cdiv(words, 16 * config.chunks)
    tiles = triton.cdiv(n, config.n), triton.cdiv(rows, config.m)
    counters = None if config.splits == 1 else _counters(x.device, tiles[0] * tiles[1])
    steps_per_split = triton.cdiv(steps, 1 if counters is None else config.splits)
    splits = triton.cdiv(steps, steps_per_split)
    parts = (
        x.new_empty((tiles[0] * tiles[1] * splits * config.n * config.m,), dtype=torch.float32) if splits > 1 else None
    )
    out = _result(x, beside, rows, outputs)
    several_rows[(*tiles, splits)](
        *(readable(x), weight.data, weight.scales, weight.zeros),
        *(None if weight.bias is None else readable(weight.bias), beside.residual, out, parts),
        *(None if splits == 1 else counters, rows, outputs, n, k, words, weight.scales.shape[1], steps_per_split),
        BITS=bits,
        GROUP=group_size,
        HALF=x.dtype == torch.float16,
        ACTIVATION=beside.activation,
        GATED=beside.gated,
        N=config.n,
        M=config.m,
        CHUNKS=config.chunks,
        SPLIT=splits > 1,
        STAGES=config.stages,
        SCALED=config.scaled,
        WHOLE=k == steps * run,
        WIDE=x.device.type == "cpu",
        num_warps=config.threads // 32,
    )
    return out.to(beside.result)


def multiply_few(x: Tensor, weight: Operands, beside: Beside, *, config: FewRows | None = None) -> Tensor:
    """x (R, K) in 16 bits, R up to 16 -> (R, outputs) in one launch; the norm of `beside` has been applied."""
    rows, k = x.shape
    bits, group_size = weight.format.bits, weight.format.group_size
    n, outputs, words = weight.out_features, beside.outputs(weight), weight.data.shape[1]
    config = config or choose_few_rows(bits, group_size, rows, n, k, gated=beside.gated)
    assert weight.scales is not None
    if k % 2:
        x = F.pad(x, (0, 1))
    out = _result(x, beside, rows, outputs)
    bias = None if weight.bias is None else readable(weight.bias)
    tiles = min(config.tiles, triton.next_power_of_2(triton.cdiv(rows, 8)))
    few_rows[(triton.cdiv(n, 32 * config.side), triton.cdiv(rows, 8 * tiles))](
        *(_pairs(x), weight.data, readable(weight.scales), weight.zeros, bias, beside.residual, out),
        *(rows, outputs, n, x.shape[1] // 2, words, weight.scales.shape[1], words // 16),
        BITS=bits,
        GROUP=group_size,
        HALF=x.dtype == torch.float16,
        ACTIVATION=beside.activation,
        GATED=beside.gated,
        TILES=tiles,
        AHEAD=config.ahead,
        WARPS=config.warps,
        SIDE=config.side,
        WIDE=x.device.type == "cpu",
        num_warps=config.warps * config.side,
        maxnreg=config.registers,
        **early_start(x.device, config.early),
    )
    return out.to(beside.result)


def dequantized(weight: Operands, k: int, dtype: torch.dtype) -> Operands:
    """A packed weight as (N, K) 16-bit numbers, for the time of one product."""
    n, words, format = weight.out_features, weight.data.shape[1], weight.format
    assert weight.scales is not None
    out = _result(weight.data, Beside(dtype), n, k)
    blocks, chunks = 4, 4
    triton_rows.dequantize_chunks[(triton.cdiv(n, 4 * blocks), triton.cdiv(words, 16 * chunks))](
        *(weight.data, readable(weight.scales), weight.zeros, out, n, k, words, weight.scales.shape[1]),
        BITS=format.bits,
        GROUP=format.group_size,
        BLOCKS=blocks,
        CHUNKS=chunks,
    )
    return Operands(out.to(dtype), None, None, None, weight.bias, n, BFLOAT16)


def multiply_plain(x: Tensor, weight: Operands, beside: Beside) -> Tensor:
    """x (R, K) in 16 bits and a weight in as many: PyTorch's product, then one elementwise kernel at most."""
    y = F.linear(x, weight.data.to(x.dtype), None if weight.bias is None else weight.bias.to(x.dtype))
    if beside.gated or beside.activation:
        out = _result(x, beside, x.shape[0], beside.outputs(weight))
        triton_rows.activate_rows[(len(y), triton.cdiv(out.shape[1], ELEMENTS))](
            *(readable(y), out, out.shape[1], y.shape[1]),
            ACTIVATION=beside.activation,
            GATED=beside.gated,
            BLOCK=ELEMENTS,
            num_warps=2,
        )
        y = out.to(x.dtype)
    return y if beside.residual is None else beside.residual + y


def add_to_residual(residual: Tensor, x: Tensor, weight: Operands, dtype: torch.dtype) -> Tensor | None:
    """residual (R, N) float32 += x·Wᵀ within PyTorch's product of 16-bit weights; None: it is to be added otherwise."""
    if x.shape[0] <= MOST_ROWS_TO_ADD or weight.format.bits != 16 or weight.bias is not None:
        return None
    if residual.dtype != torch.float32 or not residual.is_contiguous():
        return None
    return add_product(residual.detach(), x.to(dtype), weight.data.to(dtype).t(), torch.float32)


def _pairs(tensor: Tensor) -> Tensor:
    """Its numbers as integers of two each."""
    return tensor.contiguous().view(torch.int64 if tensor.itemsize == 4 else torch.int32)


def _one_dtype(norm: NormArguments, dtype: torch.dtype) -> bool:
    """Whether kernels can read the norm's weight and bias as they are: alike, in float32 or the product's dtype."""
    own = norm.weight.dtype
    return own in (torch.float32, dtype) and (norm.bias is None or norm.bias.dtype == own)


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _result(x: Tensor, beside: Beside, *size: int) -> Tensor:
    """What a kernel writes to. Triton's interpreter cuts bfloat16 off where a GPU rounds: there it writes float32."""
    return x.new_empty(size, dtype=torch.float32 if x.device.type == "cpu" else beside.result)


# Counters of the tiles whose K is split; a launch leaves them at 0. Launches of one stream come one after the other and
# share theirs, a captured launch keeps its own: its graph may run beside other streams.
COUNTERS = {"stream": 1 << 12, "captured": 1 << 20}
_counters_of: dict[tuple[torch.device, int | None], Tensor] = {}  # by the stream, None: of captured launches
_taken: dict[torch.device, int] = {}  # of those for captured launches
_lock = threading.Lock()


def _counters(device: torch.device, count: int) -> Tensor | None:
    """Return `count` zeros (int32), or None where there are none left: then K is not split."""
    on_gpu = device.type == "cuda"
    with _lock:
        if not on_gpu or not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
            # Those for captures are made here too: what is made during a capture is not zero.
            for key, kind in (((device, stream), "stream"), ((device, None), "captured")):
                if key not in _counters_of:
                    _counters_of[key] = torch.zeros(COUNTERS[kind], dtype=torch.int32, device=device)
            own = _counters_of[device, stream]
            return own[:count] if count <= len(own) else None
        if (device, None) not in _counters_of:
            return None
        start = _taken.get(device, 0)
        if start + count > COUNTERS["captured"]:
            return None
        _taken[device] = start + count
        return _counters_of[device, None][start : start + count]
