"""How a layer keeps its weight in memory: panels for the native kernels, plain rows for PyTorch's, chunks for Triton's.

Both directions are exact: unpack(pack(weight)) is the weight, bit for bit. `Packed` tensors by format (W is N×K, G the
number of groups in K, P = ceil(N / 64) panels; K' is K padded to 32, or to the group size):

             panels (described in gemm.h)                            rows
  bfloat16   data bf16 (P, K'/2, 64, 2)                              data bf16 (N, K)
  float16    data f16 (P, K', 64, 1)                                 data f16 (N, K)
  int8       data uint8 (P, K'/4, 64, 4), scales, zeros (P, G, 64)   data int8 (N, K), scales, zeros (N, G)
  int4       data uint8 (P, K'/8, 64, 4), scales, zeros (P, G, 64)   data uint8 (N, ceil(K/2)), scales, zeros (N, G);
                                                                     the low bits hold the first half of a row
  int5       data uint8 (P, 5K'/32, 64, 4), scales, zeros as int4    data uint8 (N, K), scales, zeros (N, G)
  iq4, fp4   data int8, else as int4; scales of fp4 uint8            data int8 (N, K), scales (N, G)
  float8     data float8 (P, K'/4, 64, 4), scales f32 (P, G, 64)     data float8 (N, K), scales f32 (N, G)
  k-quants   data of int2 to int6 or iq4 as above (int6: (P, 3K/16, 64, 4), int3: 3K/32, int2: K/16), and
    Q3_K, Q6_K, IQ4_XS   scales int8 (P, G, 64), outer f16 (P, K/256, 64)
    Q4_K, Q5_K           scales int32 (P, 3K/256, 64), outer f16 (P, 2K/256, 64)
    Q2_K                 scales uint8 (P, G, 64), outer f16 (P, 2K/256, 64)
                                                                     as int5, outer f16 (N, K/256, 1 or 2)

Chunks (for GPUs): 4 rows next to each other, and of each of them a 32-bit word of 8 or 4 values, so that a thread reads
16 bytes of the same features of 4 rows, and its neighbour the next 16 bytes. Chunks of 128 (int4) or 64 (int8) features
have 16 words: word w has the features 2w and 2w + 1 of each 32 of them, the second 16 bits above the first, so that
both halves of a register are what a tensor core wants side by side. int8 is stored with 128 added. data int32
(N'/4, K'/8 or K'/4, 4), scales and zeros (N'/4, G, 4), N' and K' padded to whole blocks of rows, chunks and groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hasten.errors import ConfigError
from hasten.machine.pages import joined_in_large_pages
from hasten.ops.linear.weights import MXFP4, TABLES, VALUE_DTYPES, QuantizedWeight, WeightFormat
from hasten.ops.native import native_ops
from hasten.ops.panels import PADDING, PANEL, steps

PIECE = 1 << 20  # values that are looked up at a time
LARGE = 1 << 22  # values of a weight that is packed in parts
CHUNK_ROWS = 4  # output rows of which a GPU's thread reads 16 bytes at once


class Packed(NamedTuple):
    """A weight as one layout keeps it; scales, zeros and outer scales are None where the format has none."""

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    outer: Tensor | None = None


class Operands(NamedTuple):
    """What a product takes beside x: a packed weight and its format, a bias (N,), and N.

    `planes` is how many int8 planes the activations become where a kernel multiplies integers: 1 is int8 with a scale
    for each of the weight's, 2 is 16 bits, closer to x than bfloat16 is.
    """

    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    outer: Tensor | None
    bias: Tensor | None
    out_features: int
    format: WeightFormat
    planes: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to keep weights.

    `rows(packed, format, size, ids)` gives the rows `ids` (None: all) of a weight of size (N, K).
    """

    pack: Callable[[QuantizedWeight], Packed]
    rows: Callable[[Packed, WeightFormat, tuple[int, int], Tensor | None], QuantizedWeight]


def empty_weight(size: tuple[int, int], format: WeightFormat, device: torch.device) -> QuantizedWeight:
    """A weight (N, K) that is not initialised."""
    groups, outer = (size[0], format.groups(size[1])), None
    values = torch.empty(size, dtype=VALUE_DTYPES[format.element], device=device)
    if format.element in TABLES:
        values.fill_(TABLES[format.element][0])
    if len(format.scales) > 1:
        pair = 1 if format.symmetric else 2
        outer = torch.empty(size[0], size[1] // format.scales[1].columns, pair, dtype=torch.float16, device=device)
    return QuantizedWeight(
        format=format,
        values=values,
        scales=torch.empty(groups, dtype=format.scale_dtype, device=device),
        zeros=None if format.symmetric else torch.empty(groups, dtype=format.zero_dtype, device=device),
        outer=outer,
        columns=torch.empty(size[1], dtype=torch.int64, device=device) if format.permuted else None,
    )


# Panels


def _pack_panels(weight: QuantizedWeight) -> Packed:
    values, rows = weight.values, max(1, LARGE // 4 // max(1, weight.values.shape[1]) // PANEL) * PANEL
    if values.device.type == "cpu" and values.numel() > LARGE and len(values) > rows:
        parts = (_data_panels(replace(weight, values=own)) for own in values.split(rows))
        data = joined_in_large_pages(parts, steps(len(values), PANEL))
    else:
        data = _data_panels(weight)
    if not weight.format.scales:
        return Packed(data)
    scales, zeros, outer = row_scales(weight), weight.zeros, weight.outer
    if weight.format == MXFP4:
        scales = scales.view(torch.uint8)
    if outer is not None and zeros is not None:  # minima, stored beside the scales
        scales = _words_of_scales(weight) if weight.format.group_size == 32 else scales | zeros << 4
        zeros = None
    outer = None if outer is None else panel_scales(outer.flatten(1))
    return Packed(data, panel_scales(scales), None if zeros is None else panel_scales(zeros), outer)


def pack_words(weight: QuantizedWeight) -> Packed:
    """The panels of a weight whose values are int32 words (N, ceil(K / 8)) of 8 numbers of 4 bits."""
    data = native_ops().pack_int4_words(weight.values, weight.format.group_size)
    scales, zeros = weight.scales, weight.zeros
    if weight.format.element in TABLES:
        data = data.view(torch.int8)
    if weight.format == MXFP4:
        scales = scales.view(torch.uint8)
    return Packed(data, panel_scales(scales), None if zeros is None else panel_scales(zeros))


def spread_words(weight: QuantizedWeight, in_features: int) -> QuantizedWeight:
    """The same weight with a value for each of the words' numbers, (N, K)."""
    pairs = weight.values.contiguous().view(torch.uint8)
    values = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, :in_features]
    if weight.format.element in TABLES:
        values = torch.tensor(TABLES[weight.format.element], dtype=torch.int8, device=values.device)[values.int()]
    return replace(weight, values=values)


def _data_panels(weight: QuantizedWeight) -> Tensor:
    return _integer_panels(weight) if weight.format.scales else _plain_panels(weight.values)


def _plain_panels(values: Tensor) -> Tensor:
    """The data of a weight (N, K) in 16 bits."""
    if values.dtype == torch.bfloat16:
        return native_ops().pack_bf16(values)
    n, k = values.shape
    filled = pad(values, (0, -k % PADDING, 0, -n % PANEL))
    return filled.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous().unsqueeze(3)


def _integer_panels(weight: QuantizedWeight) -> Tensor:
    """The data of a quantized weight."""
    ops, format, values = native_ops(), weight.format, weight.values
    if format.element == "int8":
        return ops.pack_bytes(values, format.group_size)
    if format.element == "float8_e4m3fn":
        return ops.pack_bytes(values.view(torch.uint8), format.group_size).view(values.dtype)
    if format.element == "int4":
        return ops.pack_int4(values, format.group_size)
    if format.element in TABLES:
        return ops.pack_int4(_places(values, format.element), format.group_size).view(torch.int8)
    return ops.pack_integers(pad(values, (0, -values.shape[1] % format.group_size)), format.bits)


def _places(values: Tensor, element: str) -> Tensor:
    """Numbers int8 (N, K) of a table as places in it, uint8."""
    found = torch.zeros_like(values, dtype=torch.uint8)
    if values.is_meta:
        return found
    table = torch.full((256,), 255, dtype=torch.uint8)
    for place, number in reversed(list(enumerate(TABLES[element]))):  # of two zeros the first
        table[number % 256] = place
    size = max(1, PIECE // values.shape[1])
    for rows, own in zip(found.split(size), values.split(size), strict=True):
        rows.copy_(table[own.view(torch.uint8).int()])
    if found.numel() and int(found.max()) > 15:
        raise ConfigError(f"the values of an {element} weight are {', '.join(map(str, TABLES[element]))}")
    return found


def _words_of_scales(weight: QuantizedWeight) -> Tensor:
    """Scales and minima of 6 bits, uint8 (N, G) each -> int32 (N, 3K/256), 3 words for 8 groups (gemm.h)."""
    assert weight.zeros is not None
    both = torch.stack((weight.scales, weight.zeros), dim=2).unflatten(1, (-1, 8)).transpose(2, 3)  # (N, B, 2, 8)
    low = (both & 15)[..., ::2] | (both & 15)[..., 1::2] << 4  # (N, B, 2, 4) bytes
    pairs = (both >> 4)[..., ::2] | (both >> 4)[..., 1::2] << 2
    upper = pairs[..., ::2] | pairs[..., 1::2] << 4  # (N, B, 2, 2)
    return torch.cat((low.flatten(2), upper.flatten(2)), dim=2).flatten(1).contiguous().view(torch.int32)


def _scales_of_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """The other way."""
    parts = words.contiguous().view(torch.uint8).unflatten(1, (-1, 12))  # (N, B, 12)
    low = parts[..., :8].unflatten(2, (2, 4))
    nibbles = torch.stack((low & 15, low >> 4), dim=-1).flatten(3)  # (N, B, 2, 8)
    rest = parts[..., 8:].unflatten(2, (2, 2))
    upper = torch.stack([rest >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(3)
    both = nibbles | upper << 4
    return both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)


def row_scales(weight: QuantizedWeight) -> Tensor:
    """The scales (N, G), in float32 where a row has one."""
    return weight.scales if weight.format.group_size else weight.scales.float()


def panel_scales(scales: Tensor) -> Tensor:
    """Scales or zeros (N, G) in the order of panels: (P, G, 64), filled up with zeros."""
    filled = pad(scales, (0, 0, 0, -len(scales) % PANEL))
    return filled.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _panel_rows(packed: Packed, format: WeightFormat, size: tuple[int, int], ids: Tensor | None) -> QuantizedWeight:
    if ids is None:
        ids = torch.arange(size[0], device=packed.data.device)

    def take(tensor: Tensor) -> Tensor:  # (P, anything, 64, …) -> (R, anything, …)
        return tensor[ids // PANEL, :, ids % PANEL]

    if packed.scales is None:
        plain = take(packed.data).flatten(1)[:, : size[1]].contiguous()
        return QuantizedWeight.plain(plain)
    values = _values_of(take(packed.data.view(torch.uint8)), format)
    scales, zeros = take(packed.scales), None if packed.zeros is None else take(packed.zeros)
    if packed.outer is not None and not format.symmetric:
        scales, zeros = _scales_of_words(scales) if format.group_size == 32 else (scales & 15, scales >> 4)
    if format == MXFP4:
        scales = scales.view(format.scale_dtype)
    outer = None if packed.outer is None else take(packed.outer).unflatten(1, (-1, 1 if format.symmetric else 2))
    return QuantizedWeight(
        format=format,
        values=values.flatten(1)[:, : size[1]].contiguous().view(VALUE_DTYPES[format.element]),
        scales=scales,
        zeros=zeros,
        outer=outer,
    )


def _values_of(words: Tensor, format: WeightFormat) -> Tensor:
    """What words of 4 bytes, uint8 (R, words, 4), hold: (R, …), flat but for the rows."""

    def split(lines: Tensor, bits: int) -> Tensor:  # (R, units, lines, 4) -> (R, units, values)
        parts = [lines >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=3).flatten(2)

    element = format.element
    if element == "int8":
        return words ^ 0x80
    if element == "float8_e4m3fn":
        return words[..., [0, 2, 1, 3]]
    if element in TABLES:
        table = torch.tensor(TABLES[element], dtype=torch.int8, device=words.device)
        return table[split(words.unsqueeze(2), 4).int()]
    low = 4 if format.bits >= 4 else 2
    if format.bits == low:
        return split(words.unsqueeze(2), low)
    lines = words.unflatten(1, (-1, 5 if element == "int5" else 3))
    return split(lines[:, :, :-1], low) | split(lines[:, :, -1:], format.bits - low) << low


PANELS = Layout(_pack_panels, _panel_rows)


# Rows


def _pack_rows(weight: QuantizedWeight) -> Packed:
    data = weight.values.contiguous()
    if not weight.format.scales:
        return Packed(data)
    if weight.format.element == "int4":
        first, second = pad(data, (0, data.shape[1] % 2)).chunk(2, dim=1)
        data = first | second << 4
    zeros, outer = (None if part is None else part.contiguous() for part in (weight.zeros, weight.outer))
    return Packed(data, row_scales(weight).contiguous(), zeros, outer)


def _row_rows(packed: Packed, format: WeightFormat, size: tuple[int, int], ids: Tensor | None) -> QuantizedWeight:
    if ids is not None:
        packed = Packed(*(None if tensor is None else tensor[ids] for tensor in packed))  # type: ignore[arg-type]
    if packed.scales is None:
        return QuantizedWeight.plain(packed.data)
    values = packed.data
    if format.element == "int4":
        values = torch.cat((values & 15, values >> 4), dim=1)[:, : size[1]]
    return QuantizedWeight(format=format, values=values, scales=packed.scales, zeros=packed.zeros, outer=packed.outer)


ROWS = Layout(_pack_rows, _row_rows)


# Chunks


def _pack_chunks(weight: QuantizedWeight) -> Packed:
    assert weight.format.scales, "chunks are integers; bfloat16 weights stay in rows"
    n, k = weight.shape
    int4 = weight.format.element == "int4"
    chunk = 128 if int4 else 64
    multiple = max(chunk, weight.format.group_size)
    values = pad(weight.values, (0, -k % multiple, 0, -n % CHUNK_ROWS)).view(torch.uint8)
    split = values.view(-1, CHUNK_ROWS, values.shape[1] // chunk, chunk // 32, 16, 2)  # (N/4, 4, C, quarters, words, 2)
    split = split[:, :, :, ::2] | split[:, :, :, 1::2] << 4 if int4 else split ^ 128
    # (N/4, chunks, words, 4, bytes): the first bytes hold the first of every two features.
    data = split.permute(0, 2, 4, 1, 5, 3).flatten(4).view(torch.int32)
    groups = values.shape[1] // (weight.format.group_size or values.shape[1])
    zeros = None if weight.zeros is None else _chunk_scales(weight.zeros, groups)
    return Packed(data.view(len(split), -1, CHUNK_ROWS), _chunk_scales(row_scales(weight), groups), zeros)


def _chunk_scales(scales: Tensor, groups: int) -> Tensor:
    """Scales or zeros (N, G) -> (N'/4, G', 4), filled up with zeros."""
    filled = pad(scales, (0, groups - scales.shape[1], 0, -len(scales) % CHUNK_ROWS))
    return filled.view(-1, CHUNK_ROWS, groups).transpose(1, 2).contiguous()


def _chunk_rows(packed: Packed, format: WeightFormat, size: tuple[int, int], ids: Tensor | None) -> QuantizedWeight:
    if ids is None:
        ids = torch.arange(size[0], device=packed.data.device)
    blocks, rows = ids // CHUNK_ROWS, ids % CHUNK_ROWS
    int4 = format.element == "int4"
    split = packed.data[blocks, :, rows].view(torch.uint8).view(len(ids), -1, 16, 2, 2)  # (R, chunks, words, 2, bytes)
    split = split.permute(0, 1, 4, 2, 3)  # (R, chunks, bytes of a half, words, 2)
    values = torch.stack((split & 15, split >> 4), dim=3).flatten(2, 3) if int4 else split ^ 0x80
    assert packed.scales is not None

    def take(scales: Tensor) -> Tensor:
        return scales[blocks, :, rows][:, : format.groups(size[1])].contiguous()

    return QuantizedWeight(
        format=format,
        values=values.flatten(1)[:, : size[1]].contiguous().view(VALUE_DTYPES[format.element]),
        scales=take(packed.scales),
        zeros=None if packed.zeros is None else take(packed.zeros),
    )


CHUNKS = Layout(_pack_chunks, _chunk_rows)
