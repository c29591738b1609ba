"""Formats of weights: their sizes, their names, and the numbers that each stands for, by hand."""

from dataclasses import replace

import pytest
import torch

from hasten.errors import ConfigError
from hasten.ops.linear import BFLOAT16, INT8, KERNELS, LinearRequest, QuantizedWeight, int4_format
from hasten.ops.linear.weights import (
    FLOAT16,
    INT4_GROUP,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TABLES,
    Scales,
    WeightFormat,
    check_format,
    check_scales,
    check_values,
    check_weight,
    fp8_format,
    group_format,
    minimum_format,
)
from linear_cases import PACKED_FORMATS, random_weight

SIZES = [  # bits of a value, integer that encodes 0, scales in a row of 512, bits with the scales
    (BFLOAT16, 16, 0, 0, 16),
    (FLOAT16, 16, 0, 0, 16),
    (INT8, 8, 0, 1, 8 + 32 / 512),
    (group_format("int8", 32), 8, 0, 16, 8.5),
    (int4_format(32), 4, 8, 16, 4.5),
    (int4_format(128), 4, 8, 4, 4.125),
    (int4_format(0), 4, 8, 1, 4 + 16 / 512),
    (int4_format(32, bits=3), 3, 4, 16, 3.5),
    (int4_format(32, bits=2), 2, 2, 16, 2.5),
    (minimum_format("int5"), 5, 16, 16, 6),
    (minimum_format("int4"), 4, 8, 16, 5),
    (fp8_format(128), 8, 0, 4, 8.25),
    (fp8_format(), 8, 0, 1, 8 + 32 / 512),
    (MXFP4, 4, 0, 16, 4.25),
    (Q2_K, 2, 2, 32, 2 + 2 * (0.5 + 0.0625)),
    (Q3_K, 3, 4, 32, 3 + 0.5 + 0.0625),
    (Q4_K, 4, 8, 16, 4 + 2 * (0.25 + 0.0625)),
    (Q5_K, 5, 16, 16, 5 + 2 * (0.25 + 0.0625)),
    (Q6_K, 6, 32, 32, 6 + 0.5 + 0.0625),
    (IQ4_XS, 4, 0, 16, 4 + 0.25 + 0.0625),
]


@pytest.mark.parametrize(("format", "bits", "middle", "groups", "stored"), SIZES)
def test_sizes(format, bits, middle, groups, stored):
    found = (format.bits, format.middle, format.groups(512), format.bits_of(512))
    assert found == (bits, middle, groups, stored)


def test_a_last_group_may_be_shorter():
    assert [int4_format(32).groups(k) for k in (1, 32, 33, 64)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("format", "name", "text"),
    [
        (Q4_K, "Q4_K", "4 bits, groups of 32 in blocks of 256"),
        (IQ4_XS, "IQ4_XS", "4 bits, groups of 32 in blocks of 256"),
        (BFLOAT16, "bfloat16", "bfloat16"),
        (FLOAT16, "float16", "float16"),
        (INT8, "int8", "8 bits, one scale a row, symmetric"),
        (int4_format(64), "int4", "4 bits, groups of 64, symmetric"),
        (int4_format(64, symmetric=False), "int4 with zero points", "4 bits, groups of 64, with zero points"),
        (minimum_format("int5"), "int5 with minima", "5 bits, groups of 32, with minima"),
        (fp8_format(), "float8_e4m3fn", "float8_e4m3fn, one scale a row or matrix"),
        (
            WeightFormat(element="float8_e4m3fn", scales=(Scales(torch.float32, 128, 64),)),
            "float8_e4m3fn",
            "float8_e4m3fn, blocks of 64 × 128",
        ),
    ],
)
def test_names(format, name, text):
    assert (format.name, str(format)) == (name, text)


def by_hand(weight, n, k):
    """One number, in Python's floats."""
    format, group = weight.format, k // (weight.format.group_size or weight.shape[1])
    value = float(weight.values[n, k])
    if format.element == "fp4":
        return value * 2.0 ** (int(weight.scales.view(torch.uint8)[n, group]) - 128)
    scale = float(weight.scales[n, group])
    zero = None if weight.zeros is None else float(weight.zeros[n, group])
    if weight.outer is not None:
        outer = weight.outer[n, k // 256].tolist()
        return outer[0] * scale * (value - format.middle if zero is None else value) - (
            0 if zero is None else outer[1] * zero
        )
    if format.zero == "minimum":
        return scale * value - zero
    return scale * (value - (format.middle if zero is None else zero))


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_every_format_is_its_formula(name):
    weight = random_weight(name, 2, 512)
    found = weight.dequantize(torch.float64)
    expected = torch.tensor([[by_hand(weight, n, k) for k in range(512)] for n in range(2)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(weight.rows(slice(1, 2)).dequantize(torch.float64), found[1:])
    twice = QuantizedWeight.joined([weight, weight.rows(torch.tensor([1, 0]))])
    assert twice.shape == (4, 512)
    assert torch.equal(twice.dequantize(torch.float64), found[[0, 1, 1, 0]])
    check_weight(weight)


def test_every_exponent_of_mxfp4_is_its_power_of_two():
    """Scales count half, because the values are twice those of e2m1; the least are subnormal."""
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    values = torch.tensor([1, -12]).to(torch.int8).repeat(255, 16)
    weight = QuantizedWeight(format=MXFP4, values=values, scales=exponents.view(torch.float8_e8m0fnu))
    expected = values.double() * 2.0 ** (exponents.double() - 128)
    assert torch.equal(weight.dequantize(), expected.float())


def test_columns_may_belong_to_any_group():
    format = replace(int4_format(4, symmetric=False), permuted=True)
    values = torch.arange(16, dtype=torch.uint8).view(2, 8)
    scales, zeros = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).bfloat16(), torch.tensor([[1, 2], [3, 4]]).to(torch.uint8)
    columns = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0])
    weight = QuantizedWeight(format=format, values=values, scales=scales, zeros=zeros, columns=columns)
    expected = (values.float() - zeros.float()[:, columns]) * scales.float()[:, columns]
    assert torch.equal(weight.dequantize(), expected)


def test_a_plain_weight_is_its_values():
    for dtype, format in ((torch.bfloat16, BFLOAT16), (torch.float16, FLOAT16)):
        values = torch.randn(3, 5).to(dtype)
        weight = QuantizedWeight.plain(values)
        assert (weight.format, weight.shape, weight.scales.shape) == (format, (3, 5), (3, 0))
        assert torch.equal(weight.dequantize(), values.float())


LAYERS = [BFLOAT16, FLOAT16, INT8, MXFP4, Q3_K, minimum_format("int4"), minimum_format("int5"), fp8_format()]
LAYERS += [fp8_format(1), int4_format(1), int4_format(96, symmetric=False), group_format("int8", 32, symmetric=False)]
LAYERS += [group_format("iq4", 32), group_format("int5", 32)]
OTHERS = [minimum_format("int8"), int4_format(0), int4_format(-32), int4_format(32, bits=3), group_format("int6", 32)]
OTHERS += [group_format("iq4", 32, symmetric=False), group_format("int5", 32, symmetric=False), fp8_format(-1)]
OTHERS += [replace(int4_format(32), permuted=True), replace(fp8_format(), permuted=True)]
OTHERS += [group_format("int4", True), WeightFormat(element="float8_e4m3fn", scales=(Scales(torch.float16),))]


@pytest.mark.parametrize("format", LAYERS, ids=str)
def test_formats_that_layers_hold(format):
    check_format(format)
    check_format(format, format.element)
    with pytest.raises(ConfigError, match="use int7 or other"):
        check_format(format, "int7", "other")


@pytest.mark.parametrize("format", OTHERS, ids=repr)
def test_formats_that_no_layer_holds(format):
    with pytest.raises(ConfigError, match=r"no linear layer can be made of weights in WeightFormat"):
        check_format(format)


def test_scales_and_zero_points_have_their_formats_sizes_and_dtypes():
    ones, minima = torch.ones(4, 2), minimum_format("int4")
    check_scales(INT8, (4, 2), ones.half(), None)
    check_scales(int4_format(32), (4, 2), ones.bfloat16(), None)
    check_scales(minima, (4, 2), ones.half(), 99 * ones.half())  # minima are no integers of 4 bits
    check_scales(int4_format(32, symmetric=False), (4, 2), ones.bfloat16(), (15 * ones).to(torch.uint8))
    for format, scales, zeros, words in (
        (int4_format(32), ones.half(), None, r"in torch.bfloat16; found torch.float16 \(4, 2\)"),
        (INT8, ones.double(), None, "float32 or torch.bfloat16 or torch.float16; found torch.float64"),
        (int4_format(32), ones.bfloat16(), ones.bfloat16(), r"zero points none; found \(4, 2\)"),
        (minima, ones.half(), None, "in torch.float16; found none"),
        (minima, ones.half(), ones.to(torch.uint8), "found .* in torch.uint8"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_scales(format, (4, 2), scales, zeros)


def test_values_are_integers_of_the_formats_bits():
    for format, most in ((int4_format(32), 15), (Q6_K, 63), (int4_format(32, bits=2), 3)):
        check_values("values", torch.tensor([most]), format)
        check_values("values", torch.empty(0), format)
        check_values("values", torch.empty(3, device="meta"), format)
        with pytest.raises(ConfigError, match=f"are 0 to {most}; found {most + 1}"):
            check_values("values", torch.tensor([0, most + 1]), format)


def test_parts_of_a_weight_fit_together():
    weight = random_weight("Q4_K", 2, 512)
    for change, words in (
        ({"values": weight.values[0]}, r"are \(N, K\); found shape \(512,\)"),
        ({"values": weight.values.to(torch.int8)}, "holds its values as torch.uint8; found torch.int8"),
        ({"values": weight.values + 16}, "values of an int4 weight are 0 to 15"),
        ({"outer": weight.outer[:, :1]}, r"found torch.float16 \(2, 1, 2\)"),
        ({"outer": weight.outer[..., :1]}, r"\(2, 2, 2\) in torch.float16"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_weight(replace(weight, **change))


def test_fp4_is_twice_e2m1():
    """A sign, two bits of exponent with bias 1, and one of fraction; without exponent it is subnormal."""
    numbers = []
    for code in range(16):
        sign, exponent, fraction = (-1) ** (code >> 3), code >> 1 & 3, (code & 1) / 2
        numbers.append(2 * sign * (fraction if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 1)))
    assert numbers == list(TABLES["fp4"])


def test_iq4_has_the_numbers_of_ggml():
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")
    quants, numpy = pytest.importorskip("gguf.quants"), pytest.importorskip("numpy")
    block = numpy.concatenate([numpy.array([1], numpy.float16).view(numpy.uint8), numpy.arange(16, dtype=numpy.uint8)])
    numbers = quants.dequantize(block[None], gguf.GGMLQuantizationType.IQ4_NL)[0]
    assert numbers[:16].tolist() == list(TABLES["iq4"]), "the lower four bits, beneath a scale of 1"


def test_a_format_that_no_layer_holds_has_the_bits_of_its_name():
    assert [WeightFormat(element=name).bits for name in ("int7", "float8_e5m2", "float32")] == [7, 8, 32]


@pytest.mark.parametrize("kernel", ["native", "triton"])
def test_the_usual_groups_are_those_that_kernels_take(kernel):
    """Beside what the machine lacks, which they say of groups of 128 too."""
    reason = next(one for one in KERNELS if one.name == kernel).unsupported_reason
    device = torch.device("cuda" if kernel == "triton" else "cpu")
    usual, known, other = (
        reason(LinearRequest(device=device, dtype=torch.bfloat16, format=int4_format(size), in_features=3840))
        for size in (INT4_GROUP, 128, 40)
    )
    assert usual == known
    assert "not 40" in other
