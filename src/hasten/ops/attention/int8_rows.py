"""Cached keys and values in int8: a row is one head's vector of one token, D values and then their scale.

Symmetric, with a scale of its own for every token and head: its largest magnitude / 127, a float32 whose bytes follow
the values. So keys and values stay one tensor each, whose rows are written, copied and shared like any others, of D + 4
bytes instead of 2·D. These two functions are the reference of the bytes that the native kernels write (int8_rows.h).
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = 127
LEAST = 1e-34  # a row below counts as zeros: its scale's inverse would overflow


def quantize_rows(x: Tensor) -> Tensor:
    """x (…, D) -> int8 (…, D + 4). A row with a NaN or an infinity reads back as NaN."""
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    there = top.isfinite() & (top > LEAST)
    scale = torch.where(there, top / LARGEST, torch.where(top.isfinite(), 0.0, torch.nan))
    up = torch.full_like(top, LARGEST) / top
    values = torch.where(there, x.double() * up.double(), 0.0).round()  # to even, of the exact product
    return torch.cat([values.to(torch.int8), scale.contiguous().view(torch.int8)], dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 (…, D + 4) -> (…, D) in `dtype`."""
    values, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    aligned = scale.new_empty(scale.shape).copy_(scale)  # a view of another dtype has to start at a multiple of 4
    return (values.float() * aligned.view(torch.float32)).to(dtype)
