"""Weights that stand in fewer bits than are multiplied: float8_e4m3fn, and GGUF's formats."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.linear import KERNELS, LinearRequest, PackedLinear, QuantizedWeight, wide
from hasten.ops.linear.operator import MANY_ROWS
from hasten.ops.linear.weights import Q6_K, fp8_format, int4_format
from hasten.ops.picker import explain
from instruction_sets import ISAS, NATIVE, needs_native
from linear_cases import PACKED_FORMATS as FORMATS
from linear_cases import exact, layer_of, plain_error, random_weight, rms, whole

pytestmark = pytest.mark.usefixtures("two_threads")

CASES = [
    *((name, "float") for name in FORMATS),
    *((name, "int8") for name in FORMATS if not name.startswith("fp8")),
]
PARTS = ("values", "scales", "zeros", "outer")


def same(one, other):
    """The same format and numbers, bit for bit."""
    pairs = [(getattr(one, part), getattr(other, part)) for part in PARTS]
    return one.format == other.format and all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
        for a, b in pairs
    )


def test_the_weights_are_those_of_the_published_definitions():
    """ggml-quants.c's dequantize_row_q4_K and dequantize_row_q6_K, value by value; fp8 is torch's own."""
    for name in ("Q4_K", "Q6_K"):
        weight = random_weight(name, 2, 512)
        for n in range(2):
            for k in range(0, 512, 7):
                q, d = float(weight.values[n, k]), weight.outer[n, k // 256].float()
                if name == "Q4_K":
                    scale, minimum = weight.scales[n, k // 32].float(), weight.zeros[n, k // 32].float()
                    value = d[0] * scale * q - d[1] * minimum
                else:
                    value = d[0] * weight.scales[n, k // 16].float() * (q - 32)
                assert weight.dequantize()[n, k] == value
    weight = random_weight("fp8 g32", 3, 100)
    expected = weight.values.float() * weight.scales.repeat_interleave(32, dim=1)[:, :100]
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("kernel", [*(["native"] if NATIVE else []), "pytorch"])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=8, derandomize=True)
@given(n=st.integers(1, 140), k=st.integers(1, 600))
def test_unpacking_is_the_inverse_of_packing(kernel, name, n, k):
    weight = random_weight(name, n, whole(name, k))
    layer = layer_of(weight, kernel=kernel)
    assert same(layer.to_weight(), weight)
    assert torch.equal(layer.rows(torch.tensor([n - 1, 0])), weight.dequantize()[[n - 1, 0]])
    assert {key: value.shape for key, value in layer.state_dict().items()} == {
        key: value.shape
        for key, value in PackedLinear(weight.shape[1], n, weight.format, kernel=kernel).state_dict().items()
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_product_of_a_piece_at_a_time_errs_at_most_twice_a_plain_one(name, dtype, monkeypatch):
    monkeypatch.setattr(wide, "PIECE", 30 * 4 * 512)  # bytes: 30 rows of float32, 60 of bfloat16
    weight = random_weight(name, 70, 512)
    layer = layer_of(weight, torch.randn(70), kernel="pytorch", activations="float")
    for rows in (1, MANY_ROWS - 1, MANY_ROWS, 40):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(dtype)
        y, truth = layer(x), exact(weight, x, layer.bias)
        assert y.dtype == dtype
        slack = 2.0**-20 if dtype == torch.float32 else 2.0**-9  # the sum with the bias is rounded too
        assert rms(y - truth) <= 2 * plain_error(weight, x, layer) + slack * rms(truth)


@pytest.mark.parametrize("group_size", [32, 96])
def test_groups_that_end_with_a_row_and_those_that_do_not_give_the_same_numbers(group_size):
    values, scales = torch.randint(0, 16, (5, 192), dtype=torch.uint8), torch.rand(5, 192 // group_size).bfloat16()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    format = int4_format(group_size, symmetric=False)
    whole_groups = QuantizedWeight(format=format, values=values, scales=scales, zeros=zeros)
    cut = QuantizedWeight(format=format, values=values[:, :190], scales=scales, zeros=zeros)
    columns = torch.arange(192) // group_size
    permuted = replace(whole_groups, format=replace(format, permuted=True), columns=columns)
    assert torch.equal(cut.dequantize(), whole_groups.dequantize()[:, :190])
    assert torch.equal(permuted.dequantize(), whole_groups.dequantize())


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, derandomize=True)
@given(
    case=st.sampled_from(CASES),
    n=st.integers(1, 140),
    k=st.one_of(st.integers(1, 300), st.sampled_from([1024, 2080])),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_errs_at_most_twice_plain_pytorch(isa, case, n, k, rows, dtype):
    name, activations = case
    weight = random_weight(name, n, whole(name, k))
    x = torch.randn(max(rows, 200 // n), weight.shape[1], generator=torch.Generator().manual_seed(n)).to(dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(k))
    layer = layer_of(weight, bias, isa=isa, activations=activations)
    y, truth = layer(x), exact(weight, x, bias)
    assert y.dtype == dtype
    slack = 2.0**-20 if dtype == torch.float32 else 2.0**-9
    assert rms(y - truth) <= 2 * plain_error(weight, x, layer) + slack * rms(truth)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "activations"), [case for case in CASES if case[1] == "int8" or case[0] == "fp8 g128"]
)
def test_a_row_is_the_same_bits_in_any_company(isa, name, activations):
    layer = layer_of(random_weight(name, 70, 1024), isa=isa, activations=activations)
    x = torch.randn(260, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (*range(2, 18), 31, 33, 97, 257):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_every_code_of_fp8_is_its_number(isa):
    """Subnormal numbers and zeros of both signs too; NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    weight = QuantizedWeight(format=fp8_format(), values=codes.view(torch.float8_e4m3fn), scales=torch.ones(2, 1))
    one = layer_of(weight, isa=isa)
    finite = weight.values[0].float()
    finite[finite.isnan()] = 0
    assert one(torch.randn(3, 256)).isnan().all()
    codes[codes & 0x7F == 0x7F] = 0
    layer = layer_of(weight, isa=isa)
    assert torch.equal(layer(torch.eye(256))[:, 0], finite)


@needs_native
@pytest.mark.parametrize(("name", "activations"), CASES)
def test_nan_stays_in_its_row_and_compiling_changes_nothing(name, activations):
    layer = layer_of(random_weight(name, 70, 256), activations=activations)
    x = torch.randn(5, 256)
    clean = layer(x)
    x[3, 41] = torch.nan
    y = layer(x)
    assert not y[3].isfinite().any()
    assert torch.equal(y[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])
    if activations == "int8":  # the same operator with other arguments for the others
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x[:3]), clean[:3])


@needs_native
@pytest.mark.parametrize("name", FORMATS)
def test_binding_again_keeps_every_number(name):
    weight = random_weight(name, 70, 256)
    layer = layer_of(weight)
    assert layer.kernel == "native"
    y = layer(torch.ones(2, 256))
    for kernel in ("reference", "pytorch", "native"):
        layer.bind(kernel)
        assert same(layer.to_weight(), weight)
        torch.testing.assert_close(layer(torch.ones(2, 256)), y, rtol=0.02, atol=0.02 * float(y.std()))


@needs_native
def test_opcheck_of_the_packing():
    from hasten.ops.native import native_ops

    codes = torch.randint(0, 64, (70, 256), dtype=torch.uint8)
    for operator, arguments in (
        *((native_ops().pack_integers.default, (codes, bits)) for bits in (2, 3, 5, 6)),
        (native_ops().pack_bytes.default, (codes, 0)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="multiples of 32"):
        native_ops().pack_integers(codes[:, :100], 6)


def test_what_does_not_fit_is_refused_in_words(monkeypatch):
    from dataclasses import replace

    weight = random_weight("Q4_K", 3, 512)
    for wrong in (replace(weight, outer=None), replace(weight, outer=weight.outer.float())):
        with pytest.raises(ConfigError, match=r"outer scales \(3, 2, 2\) in torch.float16"):
            PackedLinear.from_weight(wrong)
    with pytest.raises(ConfigError, match="super-blocks of 256"):
        PackedLinear.from_weight(
            replace(weight, values=weight.values[:, :480], scales=weight.scales[:, :15], zeros=weight.zeros[:, :15])
        )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = LinearRequest(device=torch.device("cuda"), dtype=torch.bfloat16, format=Q6_K, in_features=256)
    assert "int8 and int4, not 6 bits, groups of 16" in dict(explain(KERNELS, request).others)["triton"]
