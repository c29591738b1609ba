"""Triton's int8 and int4 products in its interpreter; run by test_triton_linear.py in a process of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.linear import INT8, PackedLinear, int4_format
from hasten.ops.linear.layouts import PIECES, Operands
from hasten.ops.linear.triton_linear import Config, choose, few_rows, linear_operator
from linear_cases import make_weight, rms
from triton_cases import check_linear

FORMATS = [
    ("int8", 0, True),
    *((name, group, symmetric) for name in ("int4", "int8") for group in (32, 64, 128) for symmetric in (True, False)),
]


@settings(max_examples=60, derandomize=True)
@given(
    format=st.sampled_from(FORMATS),
    n=st.integers(1, 70),
    k=st.integers(1, 200),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
)
def test_errs_at_most_twice_plain_pytorch(format, n, k, rows, dtype, scale_dtype, with_bias):
    name, group_size, symmetric = format
    weight = make_weight(n, k, format=name, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    check_linear(weight, rows=rows, dtype=dtype, with_bias=with_bias, device="cpu")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 16])
def test_every_format_with_k_in_several_parts(format, rows):
    weight = make_weight(40, 600, format=format[0], group_size=format[1], symmetric=format[2])
    check_linear(weight, rows=rows, dtype=torch.bfloat16, with_bias=True, device="cpu")


@pytest.mark.parametrize("rows", range(2, 17))
def test_every_number_of_rows(rows):
    check_linear(make_weight(9, 70, group_size=32), rows=rows, dtype=torch.float16, with_bias=False, device="cpu")


@pytest.mark.parametrize("splits", [1, 2, 3, 16, 100])
def test_any_number_of_parts_gives_the_product(splits):
    weight = make_weight(20, 300, group_size=32, symmetric=False)
    packed = PIECES.pack(weight)
    x, bias = torch.randn(3, 300).half(), torch.randn(20)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    y = few_rows(x, Operands(*packed, bias, 20, weight.format), config=Config(block_n=16, block_j=16, splits=splits))
    plain = torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias.half())
    assert rms(y - exact) <= 2 * rms(plain - exact)


def test_a_nan_spoils_its_own_row_only():
    x = torch.randn(4, 64).bfloat16()
    x[2, 5] = float("nan")
    y = PackedLinear.from_weight(make_weight(10, 64, group_size=32), kernel="triton")(x)
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


def test_leading_dimensions_and_no_rows():
    layer = PackedLinear.from_weight(make_weight(10, 64), kernel="triton")
    assert layer(torch.randn(2, 3, 64).bfloat16()).shape == (2, 3, 10)
    assert layer(torch.empty(0, 64).bfloat16()).shape == (0, 10)
    assert layer(torch.empty(2, 0, 64).bfloat16()).shape == (2, 0, 10)


@pytest.mark.parametrize("group_size", [0, 32])
def test_rows_of_a_layer_and_another_kernel(group_size):
    weight = make_weight(10, 70, group_size=group_size, symmetric=not group_size)
    layer = PackedLinear.from_weight(weight, kernel="triton")
    ids = torch.tensor([[3, 9], [0, 3]])
    assert torch.equal(layer.rows(ids), weight.dequantize()[ids])
    layer.bind("pytorch")
    layer.bind("triton")
    assert torch.equal(layer.to_weight().values, weight.values)


def test_sizes_of_the_buffers_are_those_packed():
    for group_size in (0, 32, 128):
        packed = PIECES.pack(make_weight(10, 150, group_size=group_size, symmetric=not group_size))
        format = int4_format(group_size) if group_size else INT8
        empty = PackedLinear(150, 10, format, kernel="triton")
        assert packed.scales is not None
        assert (packed.data.shape, packed.scales.shape) == (empty.data.shape, empty.scales.shape)
        pieces, groups = {0: (10, 1), 32: (5, 5), 128: (8, 2)}[group_size]
        assert tuple(packed.data.shape) == (pieces, 10, 16)
        assert tuple(packed.scales.shape) == (groups, 10)


def test_operator_is_registered_as_pytorch_wants_it():
    packed = PIECES.pack(make_weight(10, 64, group_size=32, symmetric=False))
    for rows in (1, 2, 17):
        torch.library.opcheck(
            linear_operator, (torch.randn(rows, 64).bfloat16(), *packed[:3], torch.randn(10), 10, 4, 32)
        )


def test_configurations_read_sixteen_bytes_a_thread():
    for group_size in (0, 16, 32, 64, 128, 256):  # one row: as measured, 8 bytes a thread in int8, 32 in int4
        for bits in (4, 8):
            config = choose(1, 4096, group_size, bits)
            assert config.block_n * config.block_j == 1024
            assert config.block_n & (config.block_n - 1) == 0
    for rows in (2, 16):
        for n in (1, 4096, 12_288, 128_256):
            for group_size in (0, 32, 64, 128, 256):
                config = choose(rows, n, group_size)
                assert config.block_n * config.block_j >= 16 * 32 * config.warps
                assert config.block_n & (config.block_n - 1) == 0
