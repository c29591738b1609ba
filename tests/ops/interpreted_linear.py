"""Triton's int8 and int4 products in its interpreter; run by test_triton_linear.py in a process of its own."""

import math
import re

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.linear import BFLOAT16, INT8, PackedLinear, int4_format, triton_few, triton_linear
from hasten.ops.linear.layouts import CHUNKS, Operands
from hasten.ops.linear.triton_choice import (
    MOST_FEW_ROWS,
    MOST_UNPACKED_ROWS,
    FewRows,
    OneRow,
    SeveralRows,
    choose_few_rows,
    choose_one_row,
    choose_several_rows,
    serves_few_rows,
)
from hasten.ops.linear.triton_linear import (
    Beside,
    dequantized,
    fused_operator,
    linear_operator,
    multiply_few,
    multiply_row,
    multiply_rows,
)
from linear_cases import make_weight, rms
from triton_cases import FUSED_CASES, check_fused, check_linear

FORMATS = [
    ("int8", 0, True),
    *(
        (name, group, symmetric)
        for name in ("int4", "int8")
        for group in (32, 64, 128, 256)
        for symmetric in (True, False)
    ),
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


@pytest.mark.parametrize(("warps", "ahead", "side"), [(2, 1, 1), (4, 3, 1), (2, 2, 2), (16, 1, 4)])
@pytest.mark.parametrize("format", FORMATS)
def test_few_rows_cut_in_other_ways(format, warps, ahead, side):
    for dtype, (rows, n, k) in (
        (torch.bfloat16, (3, 70, 600)),
        (torch.float16, (16, 130, 1024)),
        (torch.float16, (9, 3, 71)),
    ):
        weight = make_weight(n, k, format=format[0], group_size=format[1], symmetric=format[2])
        x = torch.randn(rows, k).to(dtype)
        packed = Operands(*CHUNKS.pack(weight), None, n, weight.format)
        y = multiply_few(x, packed, Beside(dtype), config=FewRows(warps, ahead, side=side))
        exact = x.double() @ weight.dequantize().double().T
        assert rms(y - exact) <= 2 * rms(x @ weight.dequantize(dtype).T - exact)


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("format", [("int8", 0), ("int4", 32)])
def test_few_rows_of_x_in_each_program(format, tiles):
    weight = make_weight(70, 200, format=format[0], group_size=format[1])
    packed = Operands(*CHUNKS.pack(weight), None, 70, weight.format)
    for rows in (5, 21, 37):
        x = torch.randn(rows, 200).bfloat16()
        y = multiply_few(x, packed, Beside(x.dtype), config=FewRows(2, tiles=tiles))
        exact = x.double() @ weight.dequantize().double().T
        assert rms(y - exact) <= 2 * rms(x @ weight.dequantize(x.dtype).T - exact)


def test_tensor_core_registers_are_the_matrices_that_they_stand_for():
    """The assembly, each instruction as PTX lays its matrices out in registers, computes what the interpreter does."""
    code = triton_few.PRODUCTS.splitlines()[1:-1]
    generator = torch.Generator().manual_seed(0)
    registers = torch.randint(-8, 8, (28, 32, 2), generator=generator).float()  # of 32 lanes, two numbers of 16 bits
    sums = torch.randint(-8, 8, (8, 32), generator=generator).float()
    values: dict[int, torch.Tensor] = {8 + i: own for i, own in enumerate([*registers[:20], *sums])}
    lanes = torch.arange(32)
    g, t = lanes // 4, lanes % 4
    for line in code:
        assert "mma.sync.aligned.m16n8k16.row.col.f32" in line
        out, a, b, c = ([int(name[1:]) for name in part.split(",")] for part in re.findall(r"{([^}]*)}", line))
        left, right, y = torch.zeros(16, 16), torch.zeros(16, 8), torch.zeros(16, 8)
        for i, name in enumerate(a):
            for half in range(2):
                left[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = values[name][:, half]
        for i, name in enumerate(b):
            for half in range(2):
                right[2 * t + half + 8 * i, g] = values[name][:, half]
        for i, name in enumerate(c):
            y[g + 8 * (i // 2), 2 * t + i % 2] = values[name]
        y += left @ right
        values |= {name: y[g + 8 * (i // 2), 2 * t + i % 2] for i, name in enumerate(out)}
    words = [own.half().contiguous().view(torch.int32).squeeze(-1) for own in registers[:20]]  # (32,) each
    operands = [torch.stack(words[4 * i : 4 * i + 4], dim=1) for i in range(5)]
    even, odd = sums[:4].T.contiguous(), sums[4:].T.contiguous()

    @triton.jit
    def products(first, second, third, fourth, x, even, odd, HALF: tl.constexpr):
        place = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
        own_even, own_odd = triton_few.products_of_matrices(
            tl.load(first + place), tl.load(second + place), tl.load(third + place), tl.load(fourth + place),
            tl.load(x + place), tl.load(even + place), tl.load(odd + place), HALF,
        )  # fmt: skip
        tl.store(even + place, own_even)
        tl.store(odd + place, own_odd)

    products[(1,)](*operands, even, odd, HALF=True)
    assert torch.equal(even, torch.stack([values[i] for i in range(4)], dim=1))
    assert torch.equal(odd, torch.stack([values[i] for i in range(4, 8)], dim=1))


@pytest.mark.parametrize("splits", [1, 2, 3, 16])
@pytest.mark.parametrize("scaled", [True, False])
def test_any_number_of_parts_gives_the_product(splits, scaled):
    weight = make_weight(70, 600, group_size=32, symmetric=False)
    x, bias, own = torch.randn(5, 600).half(), torch.randn(70), (64, 16)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    plain = torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias.half())
    operands = Operands(*CHUNKS.pack(weight), bias, 70, weight.format)
    for _ in range(2):  # the counters are left at 0
        y = multiply_rows(x, operands, Beside(x.dtype), config=SeveralRows(*own, splits=splits, scaled=scaled))
        assert rms(y - exact) <= 2 * rms(plain - exact)


@pytest.mark.parametrize("chunks", [1, 2])
def test_several_chunks_in_a_step(chunks):
    weight = make_weight(20, 150)
    x = torch.randn(3, 150).bfloat16()
    config = SeveralRows(n=64, m=16, chunks=chunks)
    y = multiply_rows(x, Operands(*CHUNKS.pack(weight), None, 20, weight.format), Beside(x.dtype), config=config)
    exact = x.double() @ weight.dequantize().double().T
    assert rms(y - exact) <= 2 * rms(x @ weight.dequantize(x.dtype).T - exact)


@pytest.mark.parametrize(("format", "k"), [(("int8", 128, False), 64), (("int4", 256, False), 128)])
def test_features_end_within_a_group(format, k):
    weight = make_weight(20, k, format=format[0], group_size=format[1], symmetric=format[2])
    beyond = torch.full((4, k), math.nan).bfloat16()  # what lies behind x must not be read
    x = beyond[:3]
    x.copy_(torch.randn(3, k))
    operands = Operands(*CHUNKS.pack(weight), None, 20, weight.format)
    y = multiply_rows(x, operands, Beside(x.dtype), config=SeveralRows(n=64, m=16))
    exact = x.double() @ weight.dequantize().double().T
    assert rms(y - exact) <= 2 * rms(x @ weight.dequantize(x.dtype).T - exact)


@pytest.mark.parametrize(("block", "threads", "stages"), [(1, 32, 1), (2, 64, 2), (8, 128, 4)])
@pytest.mark.parametrize("format", [("int4", 32, False), ("int8", 0, True), ("bfloat16", 0, True)])
def test_one_row_cut_in_other_ways(format, block, threads, stages):
    weight = make_weight(50, 328, format=format[0], group_size=format[1], symmetric=format[2])
    plain = format[0] == "bfloat16"
    packed = Operands(weight, None, None, None, None, 50, BFLOAT16) if plain else None
    packed = packed or Operands(*CHUNKS.pack(weight), None, 50, weight.format)
    x = torch.randn(1, 328).bfloat16()
    config = OneRow(block, threads, stages)
    y = multiply_row(x, packed, Beside(x.dtype), config=config)
    full = weight.float() if plain else weight.dequantize()
    exact = x.double() @ full.double().T
    assert rms(y - exact) <= 2 * rms(x @ full.to(x.dtype).T - exact)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("format", [*FORMATS, ("bfloat16", 0, True)])
def test_norm_activation_and_residual_in_the_product(format, rows):
    for case in FUSED_CASES:
        check_fused(format, rows=rows, device="cpu", **case)


@pytest.mark.parametrize("k", [64, 71, 328])
def test_rows_are_rounded_in_the_order_of_the_bytes_of_chunks(k):
    """So that products of bytes in their places are products of the same features."""
    from hasten.ops.linear.triton_norm import rounded_rows

    weight = make_weight(8, k, format="int8")
    stored = CHUNKS.pack(weight).data.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)  # (2, 4 K') bytes
    x = torch.randn(4, k).half()
    x[1], x[2, 3], x[3, 5] = 0, float("nan"), float("inf")
    integers, scales = rounded_rows(x, None, stored.shape[1] // 4)
    own = x[:2].float()
    wanted = (own * (127 / own.abs().amax(1, keepdim=True).clamp(min=1e-30))).round()
    bytes_of_rows = stored.view(8, -1).int() - 128
    assert torch.equal(integers[:2].int() @ bytes_of_rows.T, wanted.int() @ weight.values.int().T)
    assert torch.allclose(scales[:2], own.abs().amax(1) / 127)
    assert scales[2:].isnan().all()


@pytest.mark.parametrize("format", [("int4", 32, False), ("int4", 128, True)])
def test_a_norm_in_a_launch_of_its_own(format, monkeypatch):
    monkeypatch.setattr(triton_linear, "norm_apart", lambda bits, n, k: True)
    for case in FUSED_CASES[:3]:
        check_fused(format, rows=1, device="cpu", **case)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(40, 600), (9, 71), (1, 1)])
def test_a_weight_becomes_a_16_bit_matrix(format, size):
    weight = make_weight(*size, format=format[0], group_size=format[1], symmetric=format[2])
    packed = Operands(*CHUNKS.pack(weight), None, size[0], weight.format)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantized(packed, size[1], dtype).data, weight.dequantize().to(dtype))


@pytest.mark.parametrize("format", [("int4", 32, False), ("int8", 0, True)])
def test_many_rows_in_the_product(format):
    for case in FUSED_CASES[::4]:
        check_fused(format, rows=MOST_UNPACKED_ROWS + 1, device="cpu", **case)


def test_odd_sizes_go_other_ways():
    for n, k, rows in ((6, 33, 1), (6, 33, 2), (1, 1, 1)):
        for format in (("int4", 32, False), ("int8", 0, True), ("bfloat16", 0, True)):
            check_fused(format, n=n, k=k, rows=rows, device="cpu", norm="layer", dtype=torch.bfloat16)
    check_fused(("bfloat16", 0, True), n=6, k=40, rows=1, device="cpu", dtype=torch.bfloat16, norm_dtype=torch.float16)


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
    for group_size in (0, 32, 256):
        packed = CHUNKS.pack(make_weight(10, 150, group_size=group_size, symmetric=not group_size))
        format = int4_format(group_size) if group_size else INT8
        empty = PackedLinear(150, 10, format, kernel="triton")
        assert packed.scales is not None
        assert (packed.data.shape, packed.scales.shape) == (empty.data.shape, empty.scales.shape)
        words, groups = {0: (48, 1), 32: (32, 8), 256: (32, 1)}[group_size]
        assert tuple(packed.data.shape) == (3, words, 4)
        assert tuple(packed.scales.shape) == (3, groups, 4)


def test_operators_are_registered_as_pytorch_wants_them():
    packed = CHUNKS.pack(make_weight(64, 64, group_size=32, symmetric=False))
    for rows in (1, 2, 17):
        x = torch.randn(rows, 64).bfloat16()
        operands = (*packed[:3], torch.randn(64), 64, 4, 32, 2)
        torch.library.opcheck(linear_operator, (x, *operands))
        norm = (torch.randn(64), None, 1e-5, 0.0, False)
        torch.library.opcheck(fused_operator, (x.float(), *operands, *norm, 1, True, None, torch.bfloat16))
        residual = torch.randn(rows, 64)
        torch.library.opcheck(fused_operator, (x, *operands, *norm, 0, False, residual, torch.bfloat16))


def test_choices_fit_the_kernels():
    for bits, group_size in ((4, 32), (4, 128), (8, 0), (8, 32), (16, 0)):
        for n, k in ((1, 1), (2560, 2048), (4096, 4096), (12_288, 4096), (4096, 11_008), (128_256, 2048)):
            one = choose_one_row(bits, group_size, n, k)
            assert one.block % 2 == 0, "gate and up are in one program"
            for rows in range(1, MOST_FEW_ROWS + 1):
                few = choose_few_rows(bits, group_size, rows, n, k, gated=rows % 2 == 0)
                assert few.warps in (2, 4, 8, 16)
                assert few.warps * few.side * few.registers * 32 <= 1 << 16, "registers"
                assert serves_few_rows(rows, n, k)
            if serves_few_rows(64, n, k):
                few = choose_few_rows(bits, group_size, 64, n, k)
                assert few.warps * few.registers * 32 <= 1 << 16, "registers"
                assert few.tiles in (2, 4)
            for rows in (17, 64, 65, 1000):
                several = choose_several_rows(bits, group_size, rows, n, k)
                assert several.n % 64 == 0
                assert several.chunks == 1 or not group_size
                assert several.m >= min(rows, 128)
                assert several.n * several.m <= 128 * several.threads, "sums in registers"
