"""The blocks of a GGUF file's tensors, made of the numbers that `types.py` takes out of them.

Every bit returns to its place, with one exception: MXFP4 has two codes for zero, of which the positive one is written.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hasten.checkpoints.gguf.types import BITS, NIBBLES, PAIRS, TYPES
from hasten.ops.linear.weights import TABLES, QuantizedWeight

Blocks = list[Tensor]  # the fields of blocks, uint8 (B, bytes) each, in the order of the file


def encode(type_name: str, weight: QuantizedWeight) -> Tensor:
    """The rows of a weight (N, K) in the format of this type, as the file has them: uint8 (N, bytes of a row)."""
    kind = TYPES[type_name]
    blocks = len(weight.values) * weight.shape[1] // kind.elements

    def by_block(part: Tensor | None) -> Tensor:
        return torch.empty(0) if part is None else part.reshape(blocks, -1).contiguous()

    parts = [by_block(part) for part in (weight.values, weight.scales, weight.zeros, weight.outer)]
    fields = ENCODERS[type_name](*parts)
    return torch.cat([field.view(torch.uint8) for field in fields], 1).view(len(weight.values), -1)


def _merged(parts: Tensor, shifts: Sequence[int], width: int) -> Tensor:
    """The inverse of `types._parts`: uint8 (B, n · shifts) -> (B, n)."""
    split = parts.view(torch.uint8).view(len(parts), -1, len(shifts), width)
    merged = split[:, :, 0] << shifts[0]
    for place, shift in enumerate(shifts[1:], start=1):
        merged |= split[:, :, place] << shift
    return merged.flatten(1)


def _q4_0(values: Tensor, scales: Tensor, *_: Tensor) -> Blocks:
    return [scales, _merged(values, NIBBLES, 16)]


def _q4_1(values: Tensor, scales: Tensor, zeros: Tensor, _: Tensor) -> Blocks:
    return [scales, -zeros, _merged(values, NIBBLES, 16)]


def _q5_0(values: Tensor, scales: Tensor, *_: Tensor) -> Blocks:
    return [scales, _merged(values >> 4, BITS, 1), _merged(values & 15, NIBBLES, 16)]


def _q5_1(values: Tensor, scales: Tensor, zeros: Tensor, _: Tensor) -> Blocks:
    return [scales, -zeros, _merged(values >> 4, BITS, 1), _merged(values & 15, NIBBLES, 16)]


def _q8_0(values: Tensor, scales: Tensor, *_: Tensor) -> Blocks:
    return [scales, values]


def _q2_k(values: Tensor, scales: Tensor, zeros: Tensor, outer: Tensor) -> Blocks:
    return [scales | zeros << 4, _merged(values, PAIRS, 32), outer]


def _q3_k(values: Tensor, scales: Tensor, _: Tensor, outer: Tensor) -> Blocks:
    six_bits = (scales + 32).view(torch.uint8)
    packed = [_merged(six_bits & 15, NIBBLES, 8), _merged(six_bits >> 4, PAIRS, 4)]
    return [_merged(values >> 2, BITS, 32), _merged(values & 3, PAIRS, 32), *packed, outer]


def _six_bits(scales: Tensor, zeros: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits each in uint8 (B, 12)."""
    (first, later), (least, later_least) = (part.split(4, 1) for part in (scales, zeros))
    high = first | (later & 48) << 2, least | (later_least & 48) << 2
    return torch.cat((*high, later & 15 | (later_least & 15) << 4), 1)


def _q4_k(values: Tensor, scales: Tensor, zeros: Tensor, outer: Tensor) -> Blocks:
    return [outer, _six_bits(scales, zeros), _merged(values, NIBBLES, 32)]


def _q5_k(values: Tensor, scales: Tensor, zeros: Tensor, outer: Tensor) -> Blocks:
    return [outer, _six_bits(scales, zeros), _merged(values >> 4, BITS, 32), _merged(values & 15, NIBBLES, 32)]


def _q6_k(values: Tensor, scales: Tensor, _: Tensor, outer: Tensor) -> Blocks:
    return [_merged(values & 15, NIBBLES, 64), _merged(values >> 4, PAIRS, 32), scales, outer]


def _places(table: str, values: Tensor) -> Tensor:
    """The places of int8 values in a table, the first of equal ones: uint8."""
    places = torch.zeros(256, dtype=torch.uint8)
    for place, value in reversed(list(enumerate(TABLES[table]))):
        places[value & 255] = place
    return places[values.view(torch.uint8).int()]


def _iq4_nl(values: Tensor, scales: Tensor, *_: Tensor) -> Blocks:
    return [scales, _merged(_places("iq4", values), NIBBLES, 16)]


def _iq4_xs(values: Tensor, scales: Tensor, _: Tensor, outer: Tensor) -> Blocks:
    six_bits = (scales + 32).view(torch.uint8)
    packed = [_merged(six_bits >> 4, PAIRS, 1), _merged(six_bits & 15, NIBBLES, 1)]
    return [outer, *packed, _merged(_places("iq4", values), NIBBLES, 16)]


def _mxfp4(values: Tensor, scales: Tensor, *_: Tensor) -> Blocks:
    return [scales, _merged(_places("fp4", values), NIBBLES, 16)]


# The types that a packed layer holds exactly: values, scales, zeros and outer scales of each block -> its fields.
ENCODERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
