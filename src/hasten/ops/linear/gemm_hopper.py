"""When the product of many rows runs by the kernel for Hopper GPUs (gemm_hopper_kernels.py), and its launch."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from hasten.errors import HastenWarning
from hasten.ops.linear.layouts import CHUNK_ROWS, Operands
from hasten.ops.linear.triton_choice import ManyRows, choose_many_rows
from hasten.ops.linear.triton_norm import rounded_rows
from hasten.ops.triton_support import compute_capability, early_start, failed

if TYPE_CHECKING:
    from hasten.ops.linear.triton_linear import Beside

HOPPER = (9, 0)
# Registers of a thread, by the number of multiplying warp groups and of programs per multiprocessor: before they are
# redistributed, and then in the multiplying groups. The compiler counts warps in fours.
REGISTERS = {(2, 1): (168, 240), (3, 1): (128, 160), (2, 2): (80, 104)}
_failed: list[str] = []  # why Triton cannot run it


def launch_options(config: ManyRows) -> dict[str, int]:
    """The kernel's registers, and Triton's own options: of the first warp group."""
    registers, own = REGISTERS[config.groups, config.programs]
    return {"OWN": own, "num_warps": 4, "maxnreg": registers}


def serves(x: Tensor, weight: Operands) -> bool:
    """Whether it multiplies x (R, K), contiguous, in 16 bits, with a weight in the "chunks" layout."""
    if _failed or x.device.type != "cuda" or compute_capability(x.device) != HOPPER:
        return False
    rows_are_aligned = x.shape[1] * x.itemsize % 16 == 0  # for the copy engine
    return rows_are_aligned and x.data_ptr() % 16 == 0 and weight.data.data_ptr() % 16 == 0


def rounds(x: Tensor, weight: Operands) -> bool:
    """Whether `multiply` takes x (R, K), contiguous, before its norm, and rounds it to int8."""
    if _failed or x.device.type != "cuda" or compute_capability(x.device) != HOPPER:
        return False
    return weight.data.data_ptr() % 16 == 0 and _choice(x, weight).rounded


def _choice(x: Tensor, weight: Operands) -> ManyRows:
    """How a product is cut."""
    bits, group_size, zeros = weight.format.bits, weight.format.group_size, weight.zeros is not None
    sizes = x.shape[0], weight.out_features, x.shape[1]
    return choose_many_rows(bits, group_size, *sizes, with_zeros=zeros, rounds=weight.planes == 1)


def multiply(
    x: Tensor,
    weight: Operands,
    beside: "Beside",
    counters: Callable[[torch.device, int], Tensor | None],
    config: ManyRows | None = None,
) -> Tensor | None:
    """x (R, K) -> (R, outputs), as `multiply_rows`; None, with a warning, where the kernel cannot run.

    Where x is rounded, the norm of `beside` comes before that; else it has been applied. counters: give zeros for the
    tiles whose K is split. `config` is for tuning.
    """
    rows = x.shape[0]
    bits, group_size = weight.format.bits, weight.format.group_size
    n, outputs = weight.out_features, beside.outputs(weight)
    config = config or _choice(x, weight)
    assert weight.scales is not None
    steps = triton.cdiv(weight.data.shape[1], 16 * config.chunks)
    across = triton.cdiv(rows, config.m)
    tiles = triton.cdiv(n, config.n) * across
    splits = min(config.splits, steps)
    programs = min(tiles * splits, config.programs * _multiprocessors(x.device))
    splits = splits if splits * across <= programs else 1  # those of a tile wait for each other
    counted = counters(x.device, tiles * config.groups) if splits > 1 else None
    splits = 1 if counted is None else splits
    parts = x.new_empty((tiles * splits * config.n * config.m,), dtype=torch.float32) if splits > 1 else None
    out = x.new_empty((rows, outputs), dtype=beside.result)
    bias, residual, packed = weight.bias, beside.residual, weight.data.flatten(1)
    x_scales = None
    if config.rounded:
        x, x_scales = rounded_rows(x, beside.norm, 4 * weight.data.shape[1])
    try:
        kernels = importlib.import_module("hasten.ops.linear.gemm_hopper_kernels")
        kernels.many_rows[(min(tiles * splits, programs),)](
            *(_descriptor(x, config.m), _descriptor(packed, config.n // (config.groups * CHUNK_ROWS)), x_scales),
            *(weight.scales, weight.zeros, bias, residual, out, parts, counted),
            *(rows, outputs, n, weight.scales.shape[1], steps, splits),
            BITS=bits,
            GROUP=group_size,
            ACTIVATION=beside.activation,
            GATED=beside.gated,
            GROUPS=config.groups,
            R=config.n // (64 * config.groups),
            M=config.m,
            CHUNKS=config.chunks,
            SPLIT=splits > 1,
            STAGES=config.stages,
            launch_cooperative_grid=splits > 1,
            # The weight must be there before the kernel before it ends: a copy made here would not be.
            **early_start(x.device, config.early and weight.data.is_contiguous()),
            **launch_options(config),
        )
    except Exception as error:
        if not failed(error):
            raise
        _failed.append(" ".join(str(error).split())[-200:])
        message = "int8 and int4 products of many rows run without their kernel for Hopper GPUs, slower; Triton cannot "
        warnings.warn(f"{message}run it: {_failed[0]}", HastenWarning, stacklevel=2)
        return None
    return out


def _descriptor(matrix: Tensor, rows: int) -> object:
    """A matrix for the copy engine, in blocks of `rows` rows by 64 columns, of int8 by 128."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [rows, 128 if matrix.itemsize == 1 else 64]
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, _layout(matrix.itemsize))


@functools.cache
def _layout(itemsize: int) -> Any:
    """How its blocks lie in shared memory. Triton checks each layout that is made, for longer than a launch takes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
