"""Quantized weights: the description of a format, which every part of hasten shares, and the numbers of one weight."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hasten.errors import ConfigError

Zero = Literal["middle", "point", "minimum"]
VALUE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
VALUE_DTYPES |= dict.fromkeys(("int8", "iq4", "fp4"), torch.int8)
VALUE_DTYPES |= dict.fromkeys(("int6", "int5", "int4", "int3", "int2"), torch.uint8)
# The numbers that 4 bits encode: those of IQ4_NL and IQ4_XS, and twice those of e2m1 (MXFP4).
TABLES = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
_BITS = {element: int(re.findall(r"\d+", element)[0]) for element in VALUE_DTYPES}  # products ask for them each time
_ZEROS = {"middle": "symmetric", "point": "with zero points", "minimum": "with minima"}
PLAIN = (torch.bfloat16, torch.float16)  # weights that are their values
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the formats that layers hold


@dataclass(frozen=True, slots=True)
class Scales:
    """One level of scales: each belongs to a block of `rows` output and `columns` input features; 0: to all of them."""

    dtype: torch.dtype
    columns: int = 0
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight (N, K) is stored. How its activations are multiplied belongs to the operator, not to the format.

    element: what a value is: "int8" (-128 … 127), "int6" (0 … 63), "int5", "int4" (0 … 15), "int3", "int2", "iq4" or
    "fp4" (one of 16 numbers, see TABLES), or the name of a float dtype. scales: their levels, the finest first; each
    next one scales the scales before it; none: the values are the weight. zero: what encodes 0. "middle": the middle of
    the integers (0 for int8, 32 for int6, 8 for int4); "point": an integer zero point for each scale; "minimum": each
    scale has a minimum instead, which is subtracted and has scales of its own. permuted: an index says to which group a
    column belongs (GPTQ's `g_idx`).

    Kernels declare what of this they support. FP8 in blocks is `Scales(float32, 128, 128)`, MXFP4
    `Scales(float8_e8m0fnu, 32)`, NVFP4 `Scales(float8_e4m3fn, 16), Scales(float32, 0, 0)`; GGUF's k-quants have two
    levels and a minimum.
    """

    element: str
    scales: tuple[Scales, ...] = ()
    zero: Zero = "middle"
    permuted: bool = False

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return _BITS.get(self.element) or int(re.findall(r"\d+", self.element)[0])

    @property
    def group_size(self) -> int:
        """Input features that share a scale of the finest level; 0: all of a row do, or there are no scales."""
        return self.scales[0].columns if self.scales else 0

    @property
    def symmetric(self) -> bool:
        """Whether all zeros are the same, and none is stored."""
        return self.zero == "middle"

    @property
    def middle(self) -> int:
        """The integer that encodes 0 where all zero points are the same."""
        return 0 if self.bits > 6 or self.element in TABLES else 1 << (self.bits - 1)

    @property
    def zero_dtype(self) -> torch.dtype:
        """dtype of zero points (like the values') or of minima (like the scales')."""
        return self.scale_dtype if self.zero == "minimum" else VALUE_DTYPES[self.element]

    @property
    def scale_dtype(self) -> torch.dtype:
        """dtype of the finest scales; float32 if there are none."""
        return self.scales[0].dtype if self.scales else torch.float32

    def bits_of(self, in_features: int) -> float:
        """Bits of a value, with its share of the scales and minima, in rows of `in_features` values."""
        both = 2 if self.zero == "minimum" else 1
        return self.bits + both * sum(8 * one.dtype.itemsize / (one.columns or in_features) for one in self.scales)

    def groups(self, in_features: int) -> int:
        """Scales of a row; none where the values are the weight."""
        return -(-in_features // self.group_size) if self.group_size else len(self.scales[:1])

    @property
    def name(self) -> str:
        """In a word or two: a k-quant's own name, else the element, and what its zeros are where it has some."""
        return _NAMES.get(self) or self.element + ("" if self.symmetric else f" {_ZEROS[self.zero]}")

    def __str__(self) -> str:
        if not self.scales:
            return self.element
        if self.element.startswith("float"):
            rows, columns = self.scales[0].rows, self.scales[0].columns
            return f"{self.element}, {f'blocks of {rows} × {columns}' if columns else 'one scale a row or matrix'}"
        if len(self.scales) > 1:
            return f"{self.bits} bits, groups of {self.group_size} in blocks of {self.scales[1].columns}"
        groups = f"groups of {self.group_size}" if self.group_size else "one scale a row"
        return f"{self.bits} bits, {groups}, {_ZEROS[self.zero]}"


BFLOAT16, FLOAT16 = (WeightFormat(element=name) for name in ("bfloat16", "float16"))
INT4_GROUP = 32  # input features that share a scale unless another number is asked for
INT8 = WeightFormat(element="int8", scales=(Scales(torch.float32),))
SUPER_BLOCK = 256  # values of GGUF's k-quants that share the outer scales


def k_quant(element: str, group_size: int, scale: torch.dtype, zero: Zero = "middle") -> WeightFormat:
    """Groups in super-blocks, as GGUF's k-quants have them."""
    return WeightFormat(
        element=element, scales=(Scales(scale, group_size), Scales(torch.float16, SUPER_BLOCK)), zero=zero
    )


Q2_K = k_quant("int2", 16, torch.uint8, "minimum")
Q3_K = k_quant("int3", 16, torch.int8)
Q4_K = k_quant("int4", 32, torch.uint8, "minimum")
Q5_K = k_quant("int5", 32, torch.uint8, "minimum")
Q6_K = k_quant("int6", 16, torch.int8)
IQ4_XS = k_quant("iq4", 32, torch.int8)
K_QUANTS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS)
_NAMES = dict(zip(K_QUANTS, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), strict=True))
MXFP4 = WeightFormat(element="fp4", scales=(Scales(torch.float8_e8m0fnu, 32),))


def fp8_format(group_size: int = 0) -> WeightFormat:
    """float8_e4m3fn with a float32 scale for each `group_size` input features of a row; 0: for each row."""
    return WeightFormat(element="float8_e4m3fn", scales=(Scales(torch.float32, group_size),))


def group_format(
    element: str, group_size: int, *, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> WeightFormat:
    """Integers with a scale, and unless symmetric a zero point, for each `group_size` input features of a row."""
    zero: Zero = "middle" if symmetric else "point"
    return WeightFormat(element=element, scales=(Scales(scale_dtype, group_size),), zero=zero)


def minimum_format(element: str) -> WeightFormat:
    """Groups of 32 with a scale and a minimum each, both float16: Q4_1 and Q5_1."""
    return WeightFormat(element=element, scales=(Scales(torch.float16, 32),), zero="minimum")


def int4_format(
    group_size: int, *, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16, bits: int = 4
) -> WeightFormat:
    """`group_format` of 4 bits. 3 and 2 bits are the same with fewer integers, which kernels multiply as int4."""
    return group_format(f"int{bits}", group_size, symmetric=symmetric, scale_dtype=scale_dtype)


def check_format(format: WeightFormat, *elements: str) -> None:
    """Raise ConfigError for a format of which no layout holds weights, or not one of these elements."""
    if not isinstance(format, WeightFormat):
        raise ConfigError(f"a format is BFLOAT16, INT8 or int4_format(...) of hasten.ops.linear; found {format!r:.40}")
    fits = format in (BFLOAT16, FLOAT16, INT8, MXFP4, *K_QUANTS, *(minimum_format(one) for one in ("int4", "int5")))
    symmetric = format.element in ("int5", "iq4")
    if (symmetric or format.element in ("int8", "int4")) and type(format.group_size) is int and format.group_size > 0:
        same = group_format(
            format.element,
            format.group_size,
            symmetric=symmetric or format.symmetric,
            scale_dtype=format.scale_dtype,
        )
        fits |= format.scale_dtype in SCALE_DTYPES and format == same
    if format.element == "float8_e4m3fn" and type(format.group_size) is int:
        fits = format.group_size >= 0 and format == fp8_format(format.group_size)
    if not fits or (elements and format.element not in elements):
        known = (
            " or ".join(elements)
            or "bfloat16, float16, int8 with a scale for each row, int8, int5 or int4 in groups, float8_e4m3fn, or a "
            "format of GGUF"
        )
        raise ConfigError(f"no linear layer can be made of weights in {format!r}; use {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """The numbers of a weight: W[n, k] ≈ scales[n, g] · (values[n, k] - zeros[n, g]) with g = k // group size.

    int8: values int8 (N, K); iq4, fp4: int8 too, but only numbers of their TABLES, and scales of fp4 count half. int6,
    int4, …: values uint8 (N, K) without sign, in 0 … 15 of int4. float8_e4m3fn: of that dtype. scales of the format's
    dtype (N, ceil(K / group size)), zeros of the values' dtype and the same shape, or None where the format is
    symmetric.

    Of a minimum (Q4_1, Q5_1) zeros have the scales' dtype: W[n, k] = scales[n, g] · values[n, k] - zeros[n, g].

    Of two levels, `outer` float16 (N, K / 256, 1 or 2) scales the scales, and where there are minima, which `zeros`
    holds, those: W[n, k] = outer[n, b, 0] · scales[n, g] · values[n, k] - outer[n, b, 1] · zeros[n, g] (Q4_K: 0 … 63).

    columns: where the format is permuted, g of each k, (K,).

    A plain weight, of a format without scales, is one as well: its values are the numbers, and scales are (N, 0).
    """

    format: WeightFormat
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    outer: Tensor | None = None
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(output features N, input features K)."""
        return self.values.shape[0], self.values.shape[1]

    @staticmethod
    def plain(values: Tensor) -> "QuantizedWeight":
        """A weight (N, K) in bfloat16 or float16 as the layouts take it."""
        format = FLOAT16 if values.dtype == torch.float16 else BFLOAT16
        return QuantizedWeight(format=format, values=values, scales=values.new_empty(len(values), 0))

    def rows(self, rows: slice | Tensor) -> "QuantizedWeight":
        """The weight of some of the rows."""
        return self.map(lambda tensor: tensor[rows])

    def map(self, fn: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The weight of what `fn` makes of its tensors alike: some of the rows, or another device."""
        return self.joined([self], lambda own: fn(own[0]))

    @staticmethod
    def joined(
        weights: Sequence["QuantizedWeight"], join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> "QuantizedWeight":
        """One weight of the rows of several of one format, put together by `join`."""
        parts = {name: [getattr(weight, name) for weight in weights] for name in ("values", "scales", "zeros", "outer")}
        joined: dict[str, Any] = {name: join(own) for name, own in parts.items() if own[0] is not None}
        return replace(weights[0], **joined)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) as floats."""
        if not self.format.scales:
            return self.values.to(dtype)
        values, scales = self.values.float(), self.scales.float()
        if self.format.element == "fp4":
            exponent = self.scales.view(torch.uint8).int()  # of 2 ** (exponent - 128): the two least are subnormal
            bits = torch.where(exponent < 2, 0x200000 << exponent, exponent - 1 << 23)
            scales = bits.view(torch.float32)
        zeros = None if self.zeros is None else self.zeros.float()
        if self.outer is not None:  # (N, blocks, 1 or 2) -> a pair for each group
            outer = self.outer.float().repeat_interleave(self.format.scales[1].columns // self.format.group_size, dim=1)
            scales = outer[..., 0] * scales
            zeros = None if zeros is None else outer[..., 1] * zeros
        k, size = self.shape[1], self.format.group_size or self.shape[1]
        if self.columns is None and k % size == 0:  # a broadcast: 20 times as fast as an index of each value's group
            values, scales = values.unflatten(1, (-1, size)), scales.unsqueeze(2)  # (N, G, group size), (N, G, 1)
            zeros = None if zeros is None else zeros.unsqueeze(2)
        else:
            group = torch.arange(k, device=values.device) // size if self.columns is None else self.columns
            scales, zeros = scales[:, group], None if zeros is None else zeros[:, group]
        if zeros is not None and self.format.zero == "minimum":
            values.mul_(scales).sub_(zeros)
        elif zeros is not None or self.format.middle:
            values.sub_(self.format.middle if zeros is None else zeros).mul_(scales)
        else:
            values.mul_(scales)
        return values.view(self.shape).to(dtype)


def check_weight(weight: QuantizedWeight) -> None:
    """Raise ConfigError for a format, sizes, dtypes and values that no layout holds."""
    check_format(weight.format, *(element for element, dtype in VALUE_DTYPES.items() if dtype not in PLAIN))
    if weight.values.dim() != 2:
        raise ConfigError(f"the values of a weight are (N, K); found shape {tuple(weight.values.shape)}")
    dtype = VALUE_DTYPES[weight.format.element]
    if weight.values.dtype != dtype:
        raise ConfigError(f"an {weight.format.element} weight holds its values as {dtype}; found {weight.values.dtype}")
    if dtype == torch.uint8:
        check_values("values", weight.values, weight.format)
    n, k = weight.shape
    check_scales(weight.format, (n, weight.format.groups(k)), weight.scales, weight.zeros)
    if len(weight.format.scales) > 1:
        size, outer = (n, k // SUPER_BLOCK, 1 if weight.format.symmetric else 2), weight.outer
        if outer is None or k % SUPER_BLOCK or outer.dtype != torch.float16 or tuple(outer.shape) != size:
            found = "none" if outer is None else f"{outer.dtype} {tuple(outer.shape)}"
            raise ConfigError(
                f"a weight {n}×{k} in super-blocks of {SUPER_BLOCK} wants outer scales {size} in torch.float16; "
                f"found {found}"
            )


def check_scales(format: WeightFormat, size: tuple[int, int], scales: Tensor, zeros: Tensor | None) -> None:
    """Raise ConfigError unless scales (and zero points) have the dtype and the `size` (rows, groups) of this format."""
    kinds = (format.scale_dtype,) if format.group_size else SCALE_DTYPES
    if scales.dtype not in kinds or tuple(scales.shape) != size:
        raise ConfigError(
            f"an {format.element} weight wants scales {size} in {' or '.join(map(str, kinds))}; "
            f"found {scales.dtype} {tuple(scales.shape)}"
        )
    if format.symmetric and zeros is None:
        return
    dtype = format.zero_dtype
    if format.symmetric or zeros is None or zeros.dtype != dtype or tuple(zeros.shape) != size:
        wanted = "none" if format.symmetric else f"{size} in {dtype}"
        found = "none" if zeros is None else f"{tuple(zeros.shape)} in {zeros.dtype}"
        raise ConfigError(f"an {format.element} weight ({format}) wants zero points {wanted}; found {found}")
    if format.element == "int4" and format.zero == "point":
        check_values("zero points", zeros, format)


def check_values(name: str, values: Tensor, format: WeightFormat) -> None:
    """Raise ConfigError for an integer that the format's bits do not hold: packing would cut it off."""
    most = (1 << format.bits) - 1
    if values.numel() and not values.is_meta and (largest := int(values.max())) > most:
        raise ConfigError(f"the {name} of an {format.element} weight are 0 to {most}; found {largest}")
