"""What happens to rows of x before a product on a GPU: the norm, and where the product is one of integers, rounding."""

import torch
import triton
from torch import Tensor

from hasten.ops.linear.beside import NormArguments
from hasten.ops.linear.triton_rows import norm_row
from hasten.ops.triton_support import early_start, readable


def normed_rows(x: Tensor, norm: NormArguments, dtype: torch.dtype) -> Tensor:
    """The norm of x (R, K), in 16 bits."""
    out = x.new_empty(x.shape, dtype=torch.float32 if x.device.type == "cpu" else dtype)
    _launch(x, norm, out, triton.next_power_of_2(x.shape[1]))
    return out.to(dtype)


def rounded_rows(x: Tensor, norm: NormArguments | None, size: int) -> tuple[Tensor, Tensor]:
    """The norm of x (R, K) as int8 (R, size), zeros at the end, in the order of chunks (layouts.py); scales of rows."""
    out = x.new_empty((x.shape[0], size), dtype=torch.int8)
    scales = x.new_empty((x.shape[0],), dtype=torch.float32)
    _launch(x, norm, out, triton.next_power_of_2(size), scales)
    return out, scales


def _launch(x: Tensor, norm: NormArguments | None, out: Tensor, block: int, scales: Tensor | None = None) -> None:
    norm = norm or NormArguments(None, None, 0.0)  # type: ignore[arg-type]
    weight, bias = (None if own is None else readable(own) for own in (norm.weight, norm.bias))
    norm_row[(x.shape[0],)](
        *(readable(x), weight, bias, out, x.shape[1], norm.eps, norm.offset),
        CENTRED=norm.centred,
        BLOCK=block,
        scales=scales,
        out_size=out.shape[1],
        num_warps=8 if block > 1024 else 4,
        **early_start(x.device),
    )
