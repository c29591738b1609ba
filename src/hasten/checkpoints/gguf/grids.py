"""GGUF's types of 1 to 3 bits (IQ1_S to IQ3_S): eight or four numbers at a time, from tables of the package gguf.

Such a number is a small integer times the scale of its group: grid values up to 62 with a sign, or for the IQ1 types
eighths, -9 to 9. So a block is int8 values and float32 scales, with exactly the products of `gguf.quants.dequantize`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hasten.errors import ResourceError


class Integers(NamedTuple):
    """The content of B blocks, each a `QuantizedWeight` of one row: values (B, elements), scales and the minima that
    are taken away (B, groups), float16 scales of both (B, 1 or 2).
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    outer: Tensor | None = None


@lru_cache(8)
def table(name: str) -> Tensor:
    """The table of a type, int8 (entries, 4 or 8). Raises ResourceError without the package gguf."""
    try:
        from gguf import quants
    except ImportError:
        raise ResourceError(
            f"tensors of type {name} are read with tables of the package gguf: pip install 'hasten[gguf]'"
        ) from None
    kind: Any = getattr(quants, "IQ1_S" if name == "IQ1_M" else name)
    kind.init_grid()
    return torch.from_numpy(kind.grid).flatten(0, 2).to(torch.int8)


@lru_cache(1)
def sign_table() -> Tensor:
    """Eight signs for each of 128 numbers, int8 (128, 8): the seven bits of a number, and one that makes them even."""
    bits = torch.arange(128)[:, None] >> torch.arange(8) & 1
    bits[:, 7] = bits.sum(1) & 1
    return (1 - 2 * bits).to(torch.int8)


def _bits(data: Tensor) -> Tensor:
    """uint8 (B, n) -> 1 or -1 for each bit, int8 (B, 8 n), the lowest first."""
    bits = data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (1 - 2 * bits.to(torch.int8)).flatten(1)


def _words(data: Tensor, bytes_each: int) -> Tensor:
    """uint8 (B, n · bytes_each) -> int64 (B, n), little endian and without a sign."""
    parts = data.unflatten(1, (-1, bytes_each)).long() << 8 * torch.arange(bytes_each)
    return parts.sum(-1)


def _nibbles(data: Tensor) -> Tensor:
    """uint8 (B, n) -> (B, 2 n), the low one of each byte first."""
    return (data[..., None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(1)


def _half(data: Tensor) -> Tensor:
    """uint8 (B, 2) -> float32 (B, 1)."""
    return data.contiguous().view(torch.float16).float()


def iq2_xxs(blocks: Tensor) -> Integers:
    scale, rest = blocks.split((2, 64), 1)
    entries, signs, scales = _four_signs(rest.unflatten(1, (8, 8)))
    values = table("IQ2_XXS")[entries.long()].flatten(1) * signs
    return Integers(values, _half(scale) * (0.5 + scales) * 0.25)


def _four_signs(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split uint8 (B, 8, n), whose last four bytes are four numbers of signs and a scale, into the bytes before them
    (B, 8 · …), the signs (B, 256) and the scales (B, 8)."""
    words = _words(groups[..., -4:].flatten(1), 4)
    signs = sign_table()[words[..., None] >> torch.tensor([0, 7, 14, 21]) & 127]
    return groups[..., :-4].flatten(1), signs.flatten(1), words >> 28


def iq2_xs(blocks: Tensor) -> Integers:
    scale, packed, scales = blocks.split((2, 64, 8), 1)
    words = _words(packed, 2)
    values = table("IQ2_XS")[words & 511] * sign_table()[words >> 9]
    return Integers(values.flatten(1), _half(scale) * (0.5 + _nibbles(scales)) * 0.25)


def iq2_s(blocks: Tensor) -> Integers:
    scale, low, signs, high, scales = blocks.split((2, 32, 32, 8, 8), 1)
    more = (high[..., None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1).long()
    values = table("IQ2_S")[low | more << 8].flatten(1) * _bits(signs)
    return Integers(values, _half(scale) * (0.5 + _nibbles(scales)) * 0.25)


def iq3_xxs(blocks: Tensor) -> Integers:
    scale, entries, rest = blocks.split((2, 64, 32), 1)
    _, signs, scales = _four_signs(rest.unflatten(1, (8, 4)))
    values = table("IQ3_XXS")[entries.long()].flatten(1) * signs
    return Integers(values, _half(scale) * (0.5 + scales) * 0.5)


def iq3_s(blocks: Tensor) -> Integers:
    scale, low, high, signs, scales = blocks.split((2, 64, 8, 32, 4), 1)
    more = (high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1).long()
    values = table("IQ3_S")[low | more << 8].flatten(1) * _bits(signs)
    return Integers(values, _half(scale) * (1 + 2 * _nibbles(scales)))


def iq1_s(blocks: Tensor) -> Integers:
    scale, low, rest = blocks.split((2, 32, 16), 1)
    words = _words(rest, 2)  # (B, 8)
    more = words[..., None] >> torch.tensor([0, 3, 6, 9]) & 7
    shift = 1 - 2 * (words >> 15)  # an eighth up or down
    values = 8 * table("IQ1_S")[low | more.flatten(1) << 8].unflatten(1, (8, 4)) + shift[..., None, None]
    return Integers(values.to(torch.int8).flatten(1), _half(scale) * (2 * (words >> 12 & 7) + 1) / 8)


def iq1_m(blocks: Tensor) -> Integers:
    low, high, rest = blocks.split((32, 16, 8), 1)
    words = _words(rest, 2)  # (B, 4): twelve bits of four scales, four of the scale of all
    outer = (words >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True).to(torch.int32)
    outer = outer.to(torch.int16).view(torch.float16).float()
    scales = (words[..., None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    parts = _nibbles(high)  # (B, 32): three bits of an entry, and which way its eighth goes
    shift = 1 - 2 * (parts >> 3).long()
    values = 8 * table("IQ1_M")[low | (parts & 7).long() << 8] + shift[..., None]
    return Integers(values.to(torch.int8).flatten(1), outer * (2 * scales + 1) / 8)
