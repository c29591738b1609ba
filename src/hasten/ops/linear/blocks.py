"""Weights in the blocks of a GGUF file, packed for the native kernels in one pass (blocks.cpp)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.machine.pages import empty_in_large_pages
from hasten.ops.linear.layouts import Packed
from hasten.ops.linear.weights import SUPER_BLOCK, TABLES, QuantizedWeight, WeightFormat
from hasten.ops.native import native_ops
from hasten.ops.panels import PANEL, panel_shape

# ggml's numbers of the types that `pack_blocks` takes.
NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13}
NUMBERS |= {"Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A weight (N, K) as a GGUF file holds it.

    rows: uint8 (N, bytes of a row). type: a name in NUMBERS. read: the numbers of such rows, for layouts other than
    panels. check: raises for scales, minima and outer scales that are not finite.
    """

    type: str
    format: WeightFormat
    in_features: int
    rows: Tensor
    read: Callable[[Tensor], QuantizedWeight]
    check: Callable[..., None]


def pack_blocks(blocks: GgufBlocks) -> Packed:
    """The panels of a weight: those that `layouts.PANELS` makes of its numbers, bit for bit."""
    format, k = blocks.format, blocks.in_features
    shape = panel_shape(len(blocks.rows), k, format.bits, format.group_size)
    panels, groups, super_blocks = shape[0], k // format.group_size, k // SUPER_BLOCK
    minimum = not format.symmetric

    def parts(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((panels, columns, PANEL), dtype=dtype)

    zeros = outer = None
    if len(format.scales) > 1:
        words = minimum and format.group_size == 32
        scales = parts(3 * super_blocks, torch.int32) if words else parts(groups, format.scale_dtype)
        outer = parts(super_blocks * (2 if minimum else 1), torch.float16)
    else:
        scales = parts(groups, format.scale_dtype if format.scale_dtype.itemsize > 1 else torch.uint8)
        zeros = parts(groups, torch.float16) if minimum else None
    data = empty_in_large_pages(shape, dtype=torch.int8 if format.element in TABLES else torch.uint8)
    native_ops().pack_blocks(blocks.rows, NUMBERS[blocks.type], data, scales, zeros, outer)
    blocks.check(scales, zeros, outer)
    return Packed(data, scales, zeros, outer)
