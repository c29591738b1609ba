"""How a cache keeps keys and values: rows, one head's vector of one token, D values in the model's dtype or smaller.

- int8: D values, then their scale, a float32: the row's largest magnitude / 127. D + 4 bytes.
- int4: groups of 32 values, the last filled up with zeros. Byte i of a group's 16 holds value i (lower half) and value
  i + 16, from -8 to 7. After all groups follow their scales, in bfloat16: by it the value of largest magnitude is -8.
  A scale is cut to 5 significant bits, so that bfloat16 holds what is read exactly. 18 bytes a group: 72 for D = 128,
  where bfloat16 takes 256.

Rotated, a vector is turned before it is rounded (`turn`). Keys and values have channels far larger than the rest; the
turn spreads them over all channels, so that they do not set the scale of the others. It is its own inverse and keeps
scores: (Hq)·(Hk) = q·k.

Keys and values stay one tensor each, whose rows are written, copied and shared as bytes. `write` and `read` are the
reference of the native kernels (cache_rows.h), which write the same bytes and turn queries in the place of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SCALE_BYTES = 4  # of an int8 row
GROUP = 32  # values of an int4 row that share a scale
CUT = -1 << 19  # leaves 5 significant bits of a float32
LARGEST = 127
LEAST = 1e-34  # values below count as zeros: their scale's inverse would overflow


@dataclass(frozen=True, slots=True)
class RowFormat:
    """bits of a value, None: the model's dtype. rotated: turned before they are rounded."""

    bits: Literal[8, 4] | None = None
    rotated: bool = False

    def element(self, dtype: torch.dtype) -> torch.dtype:
        """dtype of the cache's tensors in a model of `dtype`."""
        return dtype if self.bits is None else torch.int8 if self.bits == 8 else torch.uint8

    def length(self, head_dim: int) -> int:
        """Elements of a row."""
        if self.bits is None:
            return head_dim
        return head_dim + SCALE_BYTES if self.bits == 8 else -(-head_dim // GROUP) * (GROUP // 2 + 2)

    def bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one row (one head's key or value) in a model of `dtype`."""
        return self.length(head_dim) * self.element(dtype).itemsize

    def write(self, x: Tensor) -> Tensor:
        """Rows of x (…, D). One with a NaN or an infinity reads back as NaN (in int4, where it is not rotated, the
        groups that have one)."""
        if self.bits is None:
            return x
        x = turn(x.float()) if self.rotated else x.float()
        return _to_int8(x) if self.bits == 8 else _to_int4(x)

    def read(self, rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Read rows: (…, D) in `dtype`."""
        if self.bits is None:
            return rows.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        x = _from_int8(rows, wide) if self.bits == 8 else _from_int4(rows, wide)[..., :head_dim]
        return (turn(x) if self.rotated else x).to(dtype)


PLAIN = RowFormat()


def turn(x: Tensor) -> Tensor:
    """x (…, D) times the Hadamard matrix of the largest power of two n that divides D, divided by √n; in each n values.

    In log2(n) passes (the fast Walsh-Hadamard transform); the matrix is symmetric and orthogonal.
    """
    size, half = x.shape[-1] & -x.shape[-1], 1
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return x * size**-0.5


def _to_int8(x: Tensor) -> Tensor:
    top = x.abs().amax(-1, keepdim=True)
    there = top.isfinite() & (top > LEAST)
    scale = torch.where(there, top / LARGEST, torch.where(top.isfinite(), 0.0, torch.nan))
    up = torch.full_like(top, LARGEST) / top
    values = torch.where(there, x.double() * up.double(), 0.0).round()  # to even, of the exact product
    return torch.cat([values.to(torch.int8), scale.contiguous().view(torch.int8)], dim=-1)


def _from_int8(rows: Tensor, dtype: torch.dtype) -> Tensor:
    values, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    aligned = scale.new_empty(scale.shape).copy_(scale)  # a view of another dtype has to start at a multiple of 4
    return values.to(dtype) * aligned.view(torch.float32).to(dtype)


def _to_int4(x: Tensor) -> Tensor:
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))  # (…, D / 32, 32)
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    top = torch.where(high > -low, high, low)  # of largest magnitude, with its sign
    there = top.isfinite() & (top.abs() > LEAST)
    scale = (torch.where(there, top / -8, 0.0).view(torch.int32) & CUT).view(torch.float32)
    values = torch.where(there, groups / scale, 0.0).round().clamp(-8, 7).to(torch.int8).view(torch.uint8)
    lower, upper = values.chunk(2, dim=-1)
    kept = scale.bfloat16().masked_fill(~top.isfinite(), torch.nan).flatten(-2)
    return torch.cat([(lower & 15 | upper << 4).flatten(-2), kept.view(torch.uint8)], dim=-1)


def _from_int4(rows: Tensor, dtype: torch.dtype) -> Tensor:
    values, scale = rows.split([count := rows.shape[-1] // 18 * 16, rows.shape[-1] - count], dim=-1)
    nibbles = torch.cat([part.unflatten(-1, (-1, 16)) for part in (values << 4, values)], dim=-1).view(torch.int8) >> 4
    aligned = scale.new_empty(scale.shape).copy_(scale)  # as above
    return (nibbles.to(dtype) * aligned.view(torch.bfloat16).to(dtype).unsqueeze(-1)).flatten(-2)
