"""Linear layers of bf16, int8 and int4 weights on every instruction set this machine can execute.

Errors are measured against the float64 product of the dequantized weights, and compared with what plain PyTorch errs:
in bfloat16, or, where activations are rounded to int8, with the same rounding written in PyTorch.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.ops.native import library
from instruction_sets import ISAS, needs_native
from linear_cases import CASES, LAYERS, SIZES, exact, layer_of, make_weight, plain_error, rms

pytestmark = pytest.mark.usefixtures("two_threads")


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, derandomize=True)
@given(
    case=CASES,
    n=SIZES,
    k=st.one_of(SIZES, st.sampled_from([256, 1024, 2080, 4100])),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    with_bias=st.booleans(),
)
def test_errs_at_most_twice_plain_pytorch(isa, case, n, k, rows, dtype, scale_dtype, with_bias):
    format, group_size, symmetric, activations = case
    weight = make_weight(n, k, format=format, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    generator = torch.Generator().manual_seed(n * 1000 + k)
    # Enough outputs for a steady error, whatever N is.
    x = torch.randn(max(rows, 200 // n), k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator) if with_bias else None
    layer = layer_of(weight, bias, isa=isa, activations=activations)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (x.shape[0], n)
    # The last term: float32 outputs of a product that PyTorch got nearly exactly (K of 1 or 2) still round once.
    slack = 2.0**-20 if dtype == torch.float32 else 2.0**-9
    truth = exact(weight, x, bias)
    assert rms(y - truth) <= 2 * plain_error(weight, x, layer) + slack * rms(truth)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("format", "group_size", "activations"),
    [
        ("bfloat16", 0, "float"),
        ("int8", 0, "int8"),
        ("int8", 0, "float"),
        ("int4", 32, "int8"),
        ("int4", 128, "int8"),
        ("int4", 64, "float"),
        ("int8", 32, "int8"),
        ("int8", 96, "int8"),
        ("int4", 160, "float"),
    ],
)
def test_a_row_is_the_same_bits_in_any_company(isa, format, group_size, activations):
    symmetric = format == "int8" or group_size == 32
    weight = make_weight(130, 2070, format=format, group_size=group_size, symmetric=symmetric)
    layer = layer_of(weight, isa=isa, activations=activations)
    x = torch.randn(300, 2070, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    # At the edges of the tiles of every instruction set, and of the blocks of rows.
    for rows in (*range(2, 18), 31, 32, 33, 49, 95, 96, 97, 200, 256, 257, 300):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
    torch.set_num_threads(1)
    assert torch.equal(layer(x[7:101]), alone[7:101])


@pytest.mark.parametrize("kernel", ["pytorch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "group_size"), [("bfloat16", 0), ("int8", 0), ("int4", 32)])
def test_the_other_kernels_err_at_most_twice_plain_pytorch(kernel, dtype, format, group_size):
    weight = make_weight(70, 300, format=format, group_size=group_size, symmetric=False)
    x, bias = torch.randn(2, 9, 300).to(dtype), torch.randn(70)
    layer = layer_of(weight, bias, kernel=kernel, activations="float")
    y, truth = layer(x), exact(weight, x, bias)
    assert y.dtype == dtype
    assert rms(y - truth) <= 2 * plain_error(weight, x, layer)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_reach_every_output_of_their_row_and_no_other(
    isa, format, group_size, activations, bad, dtype
):
    layer = layer_of(make_weight(70, 100, format=format, group_size=group_size), isa=isa, activations=activations)
    x = torch.randn(8, 100).to(dtype)
    clean = layer(x)
    x[3, 41] = bad
    y = layer(x)
    assert not y[3].isfinite().any()
    others = torch.arange(8) != 3
    assert torch.equal(y[others], clean[others])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_zeros_and_numbers_at_the_ends_of_the_range(isa, format, group_size, activations):
    weight = make_weight(70, 96, format=format, group_size=group_size)
    layer = layer_of(weight, isa=isa, activations=activations)
    assert torch.equal(layer(torch.zeros(2, 96)), torch.zeros(2, 70))
    tiny = torch.full((1, 96), 1e-40)
    assert layer(tiny).abs().max() <= 1e-30
    one = torch.randn(3, 96)
    # A power of two scales every step of the arithmetic, so results scale exactly while nothing over- or underflows.
    for factor in (2.0**100, 2.0**-80):
        assert torch.equal(layer(one * factor), layer(one) * factor)
    mixed = one.clone()
    mixed[0, ::2] = 1e-39
    truth = exact(weight, mixed)
    assert rms(layer(mixed) - truth) <= 2 * plain_error(weight, mixed, layer) + 1e-6 * rms(truth)


@needs_native
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_leading_shapes_strides_and_no_rows(format, group_size, activations):
    layer = layer_of(make_weight(70, 96, format=format, group_size=group_size), activations=activations)
    x = torch.randn(96, 5, 3)
    turned = x.permute(2, 1, 0)  # (3, 5, 96), not contiguous
    y = layer(turned)
    assert y.shape == (3, 5, 70)
    assert torch.equal(y, layer(turned.contiguous()))
    assert torch.equal(y[1, 2], layer(turned[1, 2]))
    assert torch.equal(layer(turned[:, ::2]), y[:, ::2])
    for shape in ((0, 96), (2, 0, 96)):
        assert layer(torch.empty(shape)).shape == (*shape[:-1], 70)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_opcheck_passes_for_every_operator(isa):
    ops = library(isa).ops
    w, q = torch.randn(70, 100).bfloat16(), make_weight(70, 100, format="int8")
    four = make_weight(70, 100, format="int4", group_size=32, symmetric=False)
    words = torch.randint(-(2**31), 2**31 - 1, (70, 13), dtype=torch.int32)
    samples = [
        (ops.pack_bf16.default, (w,)),
        (ops.pack_bytes.default, (q.values, 0)),
        (ops.pack_bytes.default, (q.values, 64)),
        (ops.pack_int4.default, (four.values, 32)),
        (ops.pack_int4_words.default, (words, 64)),
    ]
    for weight, group_size in ((w, 0), (q, 0), (four, 32)):
        layer = layer_of(weight, isa=isa)
        x = torch.randn(3, 100).bfloat16()
        arguments = (x, layer.data, layer.scales, layer.zeros, None, torch.randn(70), 70, group_size, 1)
        samples.append((ops.linear.default, arguments))
    # The compiler's own checks take a second each: once, the operators being the same for all instruction sets.
    limited = {} if isa == ISAS[0] else {"test_utils": ("test_schema", "test_faketensor")}
    for operator, arguments in samples:
        torch.library.opcheck(operator, arguments, **limited)
