"""The types of a GGUF file's tensors: blocks of bytes, and the numbers that they represent.

A row of K numbers is K / `elements` blocks of `bytes` bytes. All but the plain ones hold integers with a scale for a
group of them; the k-quants' scales are integers too, with a float16 for each 256 numbers, and some take a minimum away.
Numbers from a table are read as the int8 that they are multiples of. Every number is exactly that of
`gguf.quants.dequantize`, in float32. The tables of the IQ1 to IQ3 types are in `grids.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.checkpoints.gguf.grids import Integers, iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from hasten.ops.linear.weights import (
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TABLES,
    QuantizedWeight,
    WeightFormat,
    group_format,
    minimum_format,
)

# By their number in a file; those that are not in TYPES are known by name only.
NAMES = "F32 F16 Q4_0 Q4_1 4 5 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL"
NAMES += " IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 31 32 33 TQ1_0 TQ2_0 36 37 38 MXFP4 NVFP4 Q1_0 Q2_0"
TYPE_NAMES: tuple[str, ...] = tuple(NAMES.split())

NIBBLES, PAIRS, BITS = (0, 4), (0, 2, 4, 6), range(8)  # where in a byte the parts of a value begin
THREES = (1, 3, 9, 27, 81)
_OF_PARTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as that many bytes


@dataclass(frozen=True, slots=True)
class TensorType:
    """One type: plain numbers of a dtype, or integers in a format, which `decode` takes out of uint8 (B, bytes)."""

    name: str
    elements: int
    bytes: int
    dtype: torch.dtype | None = None
    format: WeightFormat | None = None
    decode: Callable[[Tensor], Integers] | None = None

    def weight(self, rows: Tensor) -> QuantizedWeight:
        """The integers of uint8 (N, bytes of a row), and their scales."""
        assert self.format is not None
        assert self.decode is not None
        parts = self.decode(rows.reshape(-1, self.bytes))._asdict()
        by_row = {name: part.view(len(rows), -1, part.shape[1]) for name, part in parts.items() if part is not None}
        by_row = {name: part if name == "outer" else part.flatten(1) for name, part in by_row.items()}
        return QuantizedWeight(format=self.format, **by_row)


def _parts(data: Tensor, shifts: Sequence[int], width: int, mask: int) -> Tensor:
    """uint8 (B, n) -> (B, n · shifts): of every `width` bytes the parts at the first shift, then those at the next."""
    if width == 1:  # looked up: a byte's parts are side by side
        every = torch.arange(256, dtype=torch.uint8).view(-1, 1) >> torch.tensor(shifts, dtype=torch.uint8) & mask
        table = every.view(_OF_PARTS[len(shifts)]).flatten()
        return table.index_select(0, data.flatten().int()).view(torch.uint8).view(len(data), -1)
    split = data.reshape(len(data), -1, width)
    parts = data.new_empty(*split.shape[:2], len(shifts), width)
    for place, shift in enumerate(shifts):
        # One operation for each, by a number: several times as fast as one for all, by a tensor of shifts.
        part = parts[:, :, place]
        if shift:
            torch.bitwise_right_shift(split, shift, out=part)
        if not shift or 255 >> shift > mask:
            torch.bitwise_and(part if shift else split, mask, out=part)
    return parts.flatten(1)


def _half(data: Tensor) -> Tensor:
    """uint8 (B, 2 n) -> float16 (B, n)."""
    return data.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Integers:
    scale, low = blocks.split((2, 16), 1)
    return Integers(_parts(low, NIBBLES, 16, 15), _half(scale))


def _q5_0(blocks: Tensor) -> Integers:
    scale, high, low = blocks.split((2, 4, 16), 1)
    return Integers(_parts(low, NIBBLES, 16, 15) | _parts(high, BITS, 1, 1) << 4, _half(scale))


def _q4_1(blocks: Tensor) -> Integers:
    scale, least, low = blocks.split((2, 2, 16), 1)
    return Integers(_parts(low, NIBBLES, 16, 15), _half(scale), -_half(least))


def _q5_1(blocks: Tensor) -> Integers:
    scale, least, high, low = blocks.split((2, 2, 4, 16), 1)
    return Integers(_parts(low, NIBBLES, 16, 15) | _parts(high, BITS, 1, 1) << 4, _half(scale), -_half(least))


def _q8_0(blocks: Tensor) -> Integers:
    scale, values = blocks.split((2, 32), 1)
    return Integers(values.contiguous().view(torch.int8), _half(scale))


def _q2_k(blocks: Tensor) -> Integers:
    scales, low, outer = blocks.split((16, 64, 4), 1)
    return Integers(_parts(low, PAIRS, 32, 3), scales & 15, scales >> 4, _half(outer))


def _q3_k(blocks: Tensor) -> Integers:
    high, low, scales, outer = blocks.split((32, 64, 12, 2), 1)
    six_bits = _parts(scales[:, :8], NIBBLES, 8, 15) | _parts(scales[:, 8:], PAIRS, 4, 3) << 4
    values = _parts(low, PAIRS, 32, 3) | _parts(high, BITS, 32, 1) << 2
    return Integers(values, six_bits.view(torch.int8) - 32, None, _half(outer))


def _six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits each, out of uint8 (B, 12)."""
    first, second, rest = data.split(4, 1)
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), 1)
    return scales, torch.cat((second & 63, rest >> 4 | second >> 2 & 48), 1)


def _q4_k(blocks: Tensor) -> Integers:
    outer, both, low = blocks.split((4, 12, 128), 1)
    return Integers(_parts(low, NIBBLES, 32, 15), *_six_bits(both), _half(outer))


def _q5_k(blocks: Tensor) -> Integers:
    outer, both, high, low = blocks.split((4, 12, 32, 128), 1)
    values = _parts(low, NIBBLES, 32, 15) | _parts(high, BITS, 32, 1) << 4
    return Integers(values, *_six_bits(both), _half(outer))


def _q6_k(blocks: Tensor) -> Integers:
    low, high, scales, outer = blocks.split((128, 64, 16, 2), 1)
    values = _parts(low, NIBBLES, 64, 15) | _parts(high, PAIRS, 32, 3) << 4
    return Integers(values, scales.contiguous().view(torch.int8), None, _half(outer))


def _iq4_xs(blocks: Tensor) -> Integers:
    outer, high, low, places = blocks.split((2, 2, 4, 128), 1)
    six_bits = _parts(low, NIBBLES, 1, 15) | _parts(high, PAIRS, 1, 3) << 4
    return Integers(_looked_up("iq4", places, 16), six_bits.view(torch.int8) - 32, None, _half(outer))


def _looked_up(table: str, places: Tensor, width: int) -> Tensor:
    """int8 (B, 2 n) from a table, by the nibbles of uint8 (B, n)."""
    return torch.tensor(TABLES[table], dtype=torch.int8)[_parts(places, NIBBLES, width, 15).int()]


def _iq4_nl(blocks: Tensor) -> Integers:
    scale, places = blocks.split((2, 16), 1)
    return Integers(_looked_up("iq4", places, 16), _half(scale))


def _mxfp4(blocks: Tensor) -> Integers:
    exponent, places = blocks.split((1, 16), 1)
    return Integers(_looked_up("fp4", places, 16), exponent.contiguous().view(torch.float8_e8m0fnu))


def _nvfp4(blocks: Tensor) -> Integers:
    scale, places = blocks.split((4, 32), 1)
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0) / 2
    codes = torch.cat((codes, codes))  # the sign of a scale counts for nothing
    codes[255] = 240.0  # as ggml's tables have it
    return Integers(_looked_up("fp4", places, 8), codes[scale.int()])


def _tq1_0(blocks: Tensor) -> Integers:
    first, second, rest, scale = blocks.split((32, 16, 4, 2), 1)
    sizes = ((first, THREES), (second, THREES), (rest, THREES[:4]))
    digits = [torch.cat([part * power for power in powers], 1) for part, powers in sizes]  # each modulo 256
    return Integers((torch.cat(digits, 1).int() * 3 >> 8).to(torch.int8) - 1, _half(scale))


def _tq2_0(blocks: Tensor) -> Integers:
    low, scale = blocks.split((64, 2), 1)
    return Integers(_parts(low, PAIRS, 32, 3).view(torch.int8) - 1, _half(scale))


def _int8(group: int, scale: torch.dtype = torch.float32) -> WeightFormat:
    return group_format("int8", group, scale_dtype=scale)


TYPES: dict[str, TensorType] = {
    one.name: one
    for one in (
        TensorType("F32", 1, 4, torch.float32),
        TensorType("F16", 1, 2, torch.float16),
        TensorType("BF16", 1, 2, torch.bfloat16),
        TensorType("Q4_0", 32, 18, None, group_format("int4", 32, scale_dtype=torch.float16), _q4_0),
        TensorType("Q4_1", 32, 20, None, minimum_format("int4"), _q4_1),
        TensorType("Q5_0", 32, 22, None, group_format("int5", 32, scale_dtype=torch.float16), _q5_0),
        TensorType("Q5_1", 32, 24, None, minimum_format("int5"), _q5_1),
        TensorType("Q8_0", 32, 34, None, _int8(32, torch.float16), _q8_0),
        TensorType("Q2_K", 256, 84, None, Q2_K, _q2_k),
        TensorType("Q3_K", 256, 110, None, Q3_K, _q3_k),
        TensorType("Q4_K", 256, 144, None, Q4_K, _q4_k),
        TensorType("Q5_K", 256, 176, None, Q5_K, _q5_k),
        TensorType("Q6_K", 256, 210, None, Q6_K, _q6_k),
        TensorType("IQ4_NL", 32, 18, None, group_format("iq4", 32, scale_dtype=torch.float16), _iq4_nl),
        TensorType("IQ4_XS", 256, 136, None, IQ4_XS, _iq4_xs),
        TensorType("MXFP4", 32, 17, None, MXFP4, _mxfp4),
        TensorType("NVFP4", 64, 36, None, _int8(16), _nvfp4),
        TensorType("TQ1_0", 256, 54, None, _int8(256, torch.float16), _tq1_0),
        TensorType("TQ2_0", 256, 66, None, _int8(256, torch.float16), _tq2_0),
        TensorType("IQ1_S", 256, 50, None, _int8(32), iq1_s),
        TensorType("IQ1_M", 256, 56, None, _int8(16), iq1_m),
        TensorType("IQ2_XXS", 256, 66, None, _int8(32), iq2_xxs),
        TensorType("IQ2_XS", 256, 74, None, _int8(16), iq2_xs),
        TensorType("IQ2_S", 256, 82, None, _int8(16), iq2_s),
        TensorType("IQ3_XXS", 256, 98, None, _int8(32), iq3_xxs),
        TensorType("IQ3_S", 256, 110, None, _int8(32), iq3_s),
    )
}
