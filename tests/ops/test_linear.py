"""Linear layers of bf16, int8 and int4 weights on every instruction set this machine can execute.

Errors are measured against the float64 product of the dequantized weights, and compared with what plain PyTorch errs:
in bfloat16, or, where activations are rounded to int8, with the same rounding written in PyTorch.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError, HastenWarning
from hasten.machine import find_compiler
from hasten.ops.linear import (
    BFLOAT16,
    INT8,
    KERNELS,
    LinearRequest,
    PackedLinear,
    QuantizedWeight,
    WeightFormat,
    int4_format,
)
from hasten.ops.linear.weights import Scales
from hasten.ops.native import library
from hasten.ops.picker import explain, pick
from instruction_sets import ISAS
from triton_cases import needs_gpu

needs_native = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
SIZES = st.integers(1, 200)
CASES = st.sampled_from(
    [
        ("bfloat16", 0, True, "float"),
        *(("int8", 0, True, activations) for activations in ("int8", "float")),
        *(
            ("int4", group, symmetric, activations)
            for group in (32, 64, 128)
            for symmetric in (True, False)
            for activations in ("int8", "float")
        ),
    ]
)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_weight(n, k, *, format, group_size=0, symmetric=True, scale_dtype=torch.float16, seed=0):
    """A random quantized weight, or a bf16 tensor."""
    generator = torch.Generator().manual_seed(seed)
    if format == "bfloat16":
        return torch.randn(n, k, generator=generator).bfloat16()
    if format == "int8":
        values = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
        return QuantizedWeight(format=INT8, values=values, scales=torch.rand(n, 1, generator=generator) + 0.1)
    size = (n, -(-k // group_size))
    zeros = torch.randint(0, 16, size, generator=generator).to(torch.uint8)
    return QuantizedWeight(
        format=int4_format(group_size, symmetric=symmetric, scale_dtype=scale_dtype),
        values=torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8),
        scales=(torch.rand(size, generator=generator) + 0.1).to(scale_dtype),
        zeros=None if symmetric else zeros,
    )


def layer_of(weight, bias=None, *, isa=None, activations="int8", **settings):
    """A layer, with the native kernel of `isa`, or another kernel by name."""
    with pytest.MonkeyPatch.context() as patch:
        if isa:
            patch.setenv("HASTEN_ISA", isa)
            settings["kernel"] = "native"
        if isinstance(weight, torch.Tensor):
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            linear.weight.data = weight
            if bias is not None:
                linear.bias.data = bias
            return PackedLinear.from_linear(linear, **settings)
        return PackedLinear.from_weight(weight, bias, activations=activations, **settings)


def exact(weight, x, bias=None):
    plain = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
    return F.linear(x.double(), plain.double(), None if bias is None else bias.double())


def plain_error(weight, x, layer):
    """Root mean square error of plain PyTorch at the layer's precision."""
    full = layer.dequantize()
    if layer.format == BFLOAT16 or layer.activations == "float":
        y = F.linear(x.bfloat16(), full.bfloat16())
    else:
        size = layer.format.group_size or x.shape[-1]
        groups = F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
        step = groups.abs().amax(-1, keepdim=True) / 127
        rounded = torch.where(step > 0, (groups / step).round() * step, 0).flatten(-2)[..., : x.shape[-1]]
        y = F.linear(rounded, full).to(x.dtype)
    return rms(y - exact(weight, x))


def rms(error):
    return error.double().square().mean().sqrt().item()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None, derandomize=True)
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
    ],
)
def test_a_row_is_the_same_bits_in_any_company(isa, format, group_size, activations):
    weight = make_weight(130, 2070, format=format, group_size=group_size, symmetric=group_size == 32)
    layer = layer_of(weight, isa=isa, activations=activations)
    x = torch.randn(300, 2070, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    # At the edges of the tiles of every instruction set, and of the blocks of rows.
    for rows in (*range(2, 18), 31, 32, 33, 49, 95, 96, 97, 200, 256, 257, 300):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
    torch.set_num_threads(1)
    assert torch.equal(layer(x[7:101]), alone[7:101])


@pytest.mark.parametrize("kernel", ["native", "pytorch", "reference"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=CASES, n=SIZES, k=SIZES, scale_dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_unpacking_is_the_inverse_of_packing(kernel, case, n, k, scale_dtype):
    format, group_size, symmetric, _ = case
    weight = make_weight(n, k, format=format, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    layer = layer_of(weight, kernel=kernel)
    ids = torch.tensor([[0, n - 1], [n // 2, 0]])
    assert torch.equal(layer.rows(ids), layer.dequantize()[ids])
    if format == "bfloat16":
        assert torch.equal(layer.dequantize(torch.bfloat16), weight)
        return
    back = layer.to_weight()
    assert back.format == weight.format
    for name in ("values", "scales", "zeros"):
        one, other = getattr(back, name), getattr(weight, name)
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other)), name
    assert torch.equal(layer.dequantize(), weight.dequantize())


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(n=SIZES, k=SIZES, group_size=st.sampled_from([32, 64, 128]), symmetric=st.booleans())
def test_int32_words_pack_as_their_values_do(isa, n, k, group_size, symmetric):
    weight = make_weight(n, k, format="int4", group_size=group_size, symmetric=symmetric)
    padded = F.pad(weight.values, (0, -k % 8)).long().unflatten(1, (-1, 8))
    words = (padded << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_ISA", isa)
        for kernel in ("native", "reference"):
            layer = PackedLinear.from_int4_words(
                words, weight.scales, weight.zeros, in_features=k, format=weight.format, kernel=kernel
            )
            assert torch.equal(layer.to_weight().values, weight.values)
            assert torch.equal(layer.dequantize(), weight.dequantize())


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


LAYERS = [
    ("bfloat16", 0, "float"),
    ("int8", 0, "int8"),
    ("int8", 0, "float"),
    ("int4", 32, "int8"),
    ("int4", 32, "float"),
]


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
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_compiles_without_a_break_and_lives_in_state_dicts(format, group_size, activations):
    weight = make_weight(70, 100, format=format, group_size=group_size, symmetric=False)
    layer = layer_of(weight, torch.randn(70), activations=activations)
    x = torch.randn(2, 3, 100).bfloat16()
    y = layer(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y)
    other = copy.deepcopy(layer)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)
    same = PackedLinear(
        100,
        70,
        layer.format,
        activations=activations,
        bias=True,
        dtype=torch.float32,
        device="meta",
    )
    assert {k: v.shape for k, v in same.state_dict().items()} == {k: v.shape for k, v in layer.state_dict().items()}
    same.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(same(x), y)
    # A change of the model's dtype must not turn the scales into another format.
    assert torch.equal(copy.deepcopy(layer).to(torch.bfloat16)(x), y)


@needs_native
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_binding_again_moves_the_weight_to_the_other_layout_and_back(format, group_size, activations):
    layer = layer_of(make_weight(70, 100, format=format, group_size=group_size), activations=activations)
    x = torch.randn(3, 100).bfloat16()
    y, weight, elements = layer(x), layer.dequantize(), layer.data.numel()
    layer.bind("reference")
    assert layer.kernel == "reference"
    assert layer.data.numel() < elements  # the panels' padding is gone, and the panels
    assert torch.equal(layer.dequantize(), weight)
    layer.bind()
    assert layer.kernel == "native"
    assert torch.equal(layer(x), y)


def numbers(layer):
    """A layer's weight, wherever it is, as tensors to compare."""
    weight = layer.dequantize() if layer.format == BFLOAT16 else layer.to_weight()
    found = (weight,) if isinstance(weight, torch.Tensor) else (weight.values, weight.scales, weight.zeros)
    return [None if part is None else part.cpu() for part in found]


TORCHS = ("float32", "pytorch")  # whichever a processor multiplies faster


def same(a, b):
    return all(x is y is None or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in zip(a, b, strict=True))


@needs_native
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_casts_pick_a_kernel_for_the_dtype_and_change_no_number(format, group_size, activations, scale_dtype):
    """float16 activations are what the native kernel does not take: its layout is left, as on another device."""
    weight = make_weight(70, 100, format=format, group_size=group_size, symmetric=False, scale_dtype=scale_dtype)
    layer = layer_of(weight, torch.randn(70), activations=activations)
    before, x = numbers(layer), torch.randn(3, 100).bfloat16()
    y = layer(x)
    model = torch.nn.Sequential(layer)
    for cast in (model.half, model.double, lambda: model.to(torch.float16)):
        cast()
        assert layer.kernel in TORCHS
        assert layer.request.dtype in (torch.float16, torch.float64)
        assert same(numbers(layer), before)
    torch.testing.assert_close(model(x.half()).float(), y.float(), rtol=0.05, atol=0.05 * float(y.std()))
    for cast in (model.float, model.bfloat16, lambda: model.type(torch.float32), lambda: model.type(torch.int32)):
        cast()
        assert layer.kernel == "native"
        assert same(numbers(layer), before)
        assert torch.equal(layer(x), y)


@needs_native
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_moving_packs_for_the_kernel_of_the_new_device(format, group_size, activations, monkeypatch):
    """ "meta" stands in for a GPU: the native kernel refuses it as it does "cuda", and the layout must follow."""

    def refuses(request):
        return "it runs on a CPU" if request.device.type == "meta" else None

    native = replace(KERNELS[0], unsupported_reason=refuses)
    others = tuple(kernel for kernel in KERNELS if kernel.name in ("pytorch", "reference"))
    monkeypatch.setattr("hasten.ops.linear.modules.KERNELS", (native, *others))
    layer = layer_of(make_weight(70, 100, format=format, group_size=group_size), activations=activations)
    at_home = copy.deepcopy(layer)
    layer.to("meta")
    at_home.bind("pytorch")
    assert layer.kernel == "pytorch"
    assert layer.request.device.type == "meta"
    assert {k: v.shape for k, v in layer.state_dict().items()} == {k: v.shape for k, v in at_home.state_dict().items()}
    assert layer(torch.empty(2, 100, device="meta", dtype=torch.bfloat16)).shape == (2, 70)
    layer.to_empty(device="cpu")
    assert layer.kernel == "native"
    # A kernel that was forced stays, as long as it serves the new place.
    layer.bind("reference")
    layer.to("meta")
    assert layer.kernel == "reference"
    layer.to_empty(device="cpu").bind("native")
    monkeypatch.setattr("hasten.ops.linear.modules.KERNELS", (*others, native))  # native is then the forced one
    layer.to("meta")
    assert layer.kernel in TORCHS


@needs_gpu
@pytest.mark.parametrize(("format", "group_size", "activations"), LAYERS)
def test_to_a_gpu_and_back(format, group_size, activations):
    layer = layer_of(make_weight(70, 256, format=format, group_size=group_size), activations=activations)
    before, x = numbers(layer), torch.randn(3, 256).bfloat16()
    y = layer(x)
    layer.cuda()
    assert layer.kernel != "native"
    assert same(numbers(layer), before)
    torch.testing.assert_close(layer(x.cuda()).cpu().float(), y.float(), rtol=0.05, atol=0.05 * float(y.std()))
    layer.cpu()
    assert torch.equal(layer(x), y)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_opcheck_passes_for_every_operator(isa):
    ops = library(isa).ops
    w, q = torch.randn(70, 100).bfloat16(), make_weight(70, 100, format="int8")
    four = make_weight(70, 100, format="int4", group_size=32, symmetric=False)
    words = torch.randint(-(2**31), 2**31 - 1, (70, 13), dtype=torch.int32)
    samples = [
        (ops.pack_bf16.default, (w,)),
        (ops.pack_int8.default, (q.values,)),
        (ops.pack_int4.default, (four.values, 32)),
        (ops.pack_int4_words.default, (words, 64)),
    ]
    for weight, group_size in ((w, 0), (q, 0), (four, 32)):
        layer = layer_of(weight, isa=isa)
        x = torch.randn(3, 100).bfloat16()
        arguments = (x, layer.data, layer.scales, layer.zeros, torch.randn(70), 70, group_size, 1)
        samples.append((ops.linear.default, arguments))
    # The compiler's own checks take a second each: once, the operators being the same for all instruction sets.
    limited = {} if isa == ISAS[0] else {"test_utils": ("test_schema", "test_faketensor")}
    for operator, arguments in samples:
        torch.library.opcheck(operator, arguments, **limited)


def test_what_does_not_fit_is_refused_in_words():
    layer = layer_of(make_weight(8, 96, format="int8"))
    with pytest.raises(ConfigError, match=r"takes 96 features; found x of shape \(2, 95\)"):
        layer(torch.randn(2, 95))
    with pytest.raises(ConfigError, match="no gradient"):
        layer(torch.randn(2, 96, requires_grad=True))
    with pytest.raises(ConfigError, match="element='int3'"):
        PackedLinear(8, 8, WeightFormat(element="int3"))
    with pytest.raises(ConfigError, match="int4 in groups"):
        PackedLinear(8, 8, int4_format(0))
    for wrong in ("int8", None, WeightFormat(element="foo"), WeightFormat(element=""), int4_format(32.0)):
        with pytest.raises(ConfigError, match=r"found 'int8'|found None|use bfloat16, int8"):
            PackedLinear(64, 8, wrong)
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(ConfigError, match="no linear layer"):
            PackedLinear(64, 8, int4_format(32, scale_dtype=dtype))
    with pytest.raises(ConfigError, match="no linear layer"):
        PackedLinear(64, 8, replace(INT8, scales=(Scales(torch.float16),)))
    with pytest.raises(ConfigError, match="use int4"):
        PackedLinear.from_int4_words(
            torch.zeros(8, 4, dtype=torch.int32), torch.ones(8, 1), in_features=32, format=INT8
        )
    with pytest.raises(ConfigError, match="use int8 or int4"):
        PackedLinear.from_weight(replace(make_weight(8, 96, format="int8"), format=BFLOAT16))
    weight = make_weight(8, 96, format="int4", group_size=32)
    wrong = replace(weight, format=int4_format(64, scale_dtype=weight.scales.dtype))
    with pytest.raises(ConfigError, match=r"scales \(8, 2\) in torch.float16; found .*\(8, 3\)"):
        PackedLinear.from_weight(wrong)
    with pytest.raises(ConfigError, match="bias of shape"):
        PackedLinear.from_weight(weight, torch.zeros(9))
    with pytest.raises(ConfigError, match="int32 words"):
        PackedLinear.from_int4_words(
            torch.zeros(8, 5, dtype=torch.int32), weight.scales, in_features=96, format=weight.format
        )
    with pytest.raises(ConfigError, match="holds no quantized weight"):
        layer_of(torch.randn(8, 8).bfloat16()).to_weight()


def test_the_picker_gives_its_reasons(monkeypatch):
    def request(**changed):
        base = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "format": int4_format(128), "in_features": 128}
        return LinearRequest(**{**base, **changed})

    def reason(**changed):
        return next(kernel for kernel in KERNELS if kernel.name == "native").unsupported_reason(request(**changed))

    if find_compiler():
        assert pick(KERNELS, request()).name == "native"
        assert ("native", "reference was asked for by name") in explain(KERNELS, request(), forced="reference").others
    assert "on cuda:0" in reason(device=torch.device("cuda:0"))
    assert "not float16" in reason(dtype=torch.float16)
    assert "multiples of 32, not 48" in reason(format=int4_format(48))
    assert "not 200000" in reason(format=INT8, in_features=200_000)
    monkeypatch.setenv("HASTEN_ISA", "none")
    assert "no compiler, or HASTEN_ISA=none" in reason()
    assert pick(KERNELS, request()).name in TORCHS
    assert PackedLinear.from_weight(make_weight(8, 96, format="int4", group_size=32)).kernel in TORCHS


def int4_weight(**changes):
    weight = make_weight(70, 65, format="int4", group_size=32, symmetric=False)
    return replace(weight, **changes)


@pytest.mark.parametrize("kernel", [*(["native"] if find_compiler() else []), "pytorch"])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.tensor(1.0), "takes 65 features"),
        (torch.ones(2, 65, dtype=torch.int32), "no int32 activations"),
        (torch.ones(2, 65, dtype=torch.bool), "no bool activations"),
    ],
)
def test_an_input_that_no_kernel_takes_is_refused_in_words(kernel, x, words):
    layer = PackedLinear.from_weight(int4_weight(), kernel=kernel)
    with torch.no_grad(), pytest.raises(ConfigError, match=words):
        layer(x)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_native_kernel_refuses_other_floats_until_the_layer_is_cast(dtype):
    layer = PackedLinear.from_weight(int4_weight())
    x = torch.randn(2, 65).to(dtype)
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"'native'.*no float\d\d.*convert x"):
            layer(x)
        assert layer.to(dtype)(x).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": torch.zeros(65, dtype=torch.uint8)}, r"values of a weight are \(N, K\)"),
        ({"values": torch.full((70, 65), 200, dtype=torch.uint8)}, "0 to 15; found 200"),
        ({"zeros": torch.full((70, 3), 16, dtype=torch.uint8)}, "zero points of an int4 weight are 0 to 15; found 16"),
        ({"zeros": torch.zeros(70, 3, dtype=torch.int32)}, "torch.uint8; found .* in torch.int32"),
        ({"zeros": torch.zeros(70, 2, dtype=torch.uint8)}, r"wants zero points \(70, 3\)"),
        ({"scales": torch.ones(70, 3, dtype=torch.int32)}, "found torch.int32"),
        ({"scales": torch.ones(70, 2)}, r"wants scales \(70, 3\)"),
        ({"format": replace(INT8, zero="point")}, "use int8 or int4"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_before_anything_is_packed(changes, words):
    with pytest.raises(ConfigError, match=words):
        PackedLinear.from_weight(int4_weight(**changes))


@pytest.mark.parametrize("changes", [{"zeros": torch.full((64, 1), 16, dtype=torch.uint8)}, {"words": torch.ones(8)}])
def test_words_are_checked_as_values_are(changes):
    parts = {
        "words": torch.zeros(64, 4, dtype=torch.int32),
        "scales": torch.ones(64, 1).half(),
        "zeros": None,
    } | changes
    format = int4_format(32, symmetric=parts["zeros"] is None, scale_dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"0 to 15; found 16|int32 words a row"):
        PackedLinear.from_int4_words(**parts, in_features=32, format=format)


@pytest.mark.parametrize("kernel", [*(["native"] if find_compiler() else []), "pytorch"])
@pytest.mark.parametrize("ids", [[70], [127], [-1], [3, 5000]])
def test_a_row_that_is_not_there_is_not_read_as_padding(kernel, ids):
    layer = PackedLinear.from_weight(int4_weight(), kernel=kernel)
    with pytest.raises(ConfigError, match="rows 0 to 69"):
        layer.rows(torch.tensor(ids))
    assert layer.rows(torch.tensor([[0, 69]])).shape == (1, 2, 65)
    assert layer.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 65)


def test_only_a_linear_layer_is_packed():
    with pytest.raises(ConfigError, match=r"made of an nn.Linear; found Conv1d"):
        PackedLinear.from_linear(torch.nn.Conv1d(8, 3, 1))


@needs_native
def test_groups_that_the_native_kernel_lacks_are_slow_with_a_warning():
    weight = make_weight(70, 96, format="int4", group_size=48)
    with pytest.warns(HastenWarning, match=r"'\w+' is used: its int4 groups are multiples of 32, not 48"):
        assert PackedLinear.from_weight(weight).kernel in TORCHS
    assert PackedLinear.from_weight(weight, kernel="pytorch").kernel == "pytorch", "asked for: no warning"
