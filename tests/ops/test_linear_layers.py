"""Packed layers: packed and unpacked exactly, bound to another kernel, cast, moved, saved and compiled."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import HastenWarning
from hasten.ops import triton_support
from hasten.ops.linear import BFLOAT16, INT8, KERNELS, LinearRequest, PackedLinear, int4_format
from hasten.ops.linear.weights import TABLES, group_format, minimum_format
from hasten.ops.picker import explain, pick
from instruction_sets import ISAS, NATIVE, needs_native
from linear_cases import CASES, LAYERS, PACKED_FORMATS, SIZES, TORCHS, exact, layer_of, make_weight, random_weight, rms
from triton_cases import needs_gpu

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize("kernel", [*(["native"] if NATIVE else []), "pytorch", "reference"])
@settings(max_examples=30, derandomize=True)
@given(case=CASES, n=SIZES, k=SIZES, scale_dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_unpacking_is_the_inverse_of_packing(kernel, case, n, k, scale_dtype):
    format, group_size, symmetric, _ = case
    weight = make_weight(n, k, format=format, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    layer = layer_of(weight, kernel=kernel)
    ids = torch.tensor([[0, n - 1], [n // 2, 0]])
    assert torch.equal(layer.rows(ids), layer.dequantize()[ids])
    assert torch.equal(layer.rows(torch.arange(n)), layer.dequantize())  # more than one thread takes at a time
    if not layer.format.scales:
        assert torch.equal(layer.dequantize(weight.dtype), weight)
        return
    back = layer.to_weight()
    assert back.format == weight.format
    for name in ("values", "scales", "zeros"):
        one, other = getattr(back, name), getattr(weight, name)
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other)), name
    assert torch.equal(layer.dequantize(), weight.dequantize())


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20, derandomize=True)
@given(n=SIZES, k=SIZES, group_size=st.sampled_from([32, 64, 128]), symmetric=st.booleans())
def test_int32_words_pack_as_their_values_do(isa, n, k, group_size, symmetric):
    weight = make_weight(n, k, format="int4", group_size=group_size, symmetric=symmetric)
    padded = F.pad(weight.values, (0, -k % 8)).long().unflatten(1, (-1, 8))
    words = (padded << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_ISA", isa)
        for kernel in ("native", "reference"):
            layer = PackedLinear.from_int4_words(replace(weight, values=words), in_features=k, kernel=kernel)
            assert torch.equal(layer.to_weight().values, weight.values)
            assert torch.equal(layer.dequantize(), weight.dequantize())


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, derandomize=True)
@given(n=SIZES, groups=st.integers(1, 5))
def test_words_of_fp4_pack_as_their_values_do(isa, n, groups):
    weight = random_weight("MXFP4", n, 32 * groups)
    places = torch.tensor([TABLES["fp4"].index(number) for number in weight.values.flatten().tolist()]).view(n, -1, 8)
    words = (places << torch.arange(0, 32, 4)).sum(2)
    words = replace(weight, values=torch.where(words >= 2**31, words - 2**32, words).to(torch.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_ISA", isa)
        for kernel in ("native", "reference"):
            layer = PackedLinear.from_int4_words(words, in_features=32 * groups, kernel=kernel)
            other = PackedLinear.from_weight(weight, kernel=kernel)
            for one, same in zip(layer.buffers(), other.buffers(), strict=True):
                assert torch.equal(one.view(torch.uint8), same.view(torch.uint8))
            assert torch.equal(layer.dequantize(), weight.dequantize())


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
    weight = layer.to_weight() if layer.format.scales else layer.dequantize()
    found = (weight,) if isinstance(weight, torch.Tensor) else (weight.values, weight.scales, weight.zeros)
    return [None if part is None else part.cpu() for part in found]


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
        return "it needs a CPU" if request.device.type == "meta" else None

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


@pytest.mark.gpu
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


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_other_formats_on_a_gpu(name, dtype):
    """Those that no Triton kernel unpacks are PyTorch's product of the dequantized weight."""
    weight, x = random_weight(name, 70, 512), torch.randn(3, 512).to(dtype)
    plain = F.linear(x, weight.dequantize(dtype))
    layer = PackedLinear.from_weight(weight.map(lambda tensor: tensor.cuda()), dtype=dtype)
    there = x.cuda()
    y, right = layer(there).cpu(), exact(weight, x)
    assert torch.equal(layer.dequantize().cpu(), weight.dequantize())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # as decode steps are
        captured = layer(there)
    graph.replay()
    torch.testing.assert_close(captured.cpu(), y)
    unit = torch.finfo(dtype).eps * right.abs().max().item()  # of the largest
    assert rms(y - right) <= 2 * rms(plain - right) + unit


def test_the_picker_gives_its_reasons(monkeypatch):
    def request(**changed):
        base = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "format": int4_format(128), "in_features": 128}
        return LinearRequest(**{**base, **changed})

    def reason(**changed):
        return next(kernel for kernel in KERNELS if kernel.name == "native").unsupported_reason(request(**changed))

    if NATIVE:
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


def kernel_named(name):
    return next(kernel for kernel in KERNELS if kernel.name == name)


@pytest.mark.parametrize(
    ("format", "dtype", "words"),
    [
        (int4_format(32), torch.bfloat16, None),
        (int4_format(256, symmetric=False), torch.float16, None),
        (group_format("int8", 128), torch.bfloat16, None),
        (INT8, torch.float16, None),
        (int4_format(48), torch.bfloat16, "its groups are 32, 64, 128, 256, not 48"),
        (INT8, torch.float32, "takes bfloat16 and float16 activations, not float32"),
        (BFLOAT16, torch.bfloat16, "PyTorch's own product is the best for bfloat16 weights"),
        (minimum_format("int4"), torch.bfloat16, "unpacks int8 and int4, not 4 bits, groups of 32, with minima"),
        (group_format("iq4", 32), torch.bfloat16, "unpacks int8 and int4"),
    ],
)
def test_what_the_triton_kernel_takes_on_a_gpu(format, dtype, words, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("cuda")
    request = LinearRequest(device=device, dtype=dtype, format=format, in_features=768)
    unsupported = kernel_named("triton").unsupported_reason
    reason = unsupported(request)
    if words is None:
        assert reason == triton_support.refusal(device)  # nothing, or what this machine lacks
    else:
        assert words in reason
    assert "it needs a CUDA GPU; the layer is on cpu" in unsupported(replace(request, device=torch.device("cpu")))


@pytest.mark.parametrize(("kernel", "reason"), [("float32", "it is emulated"), ("pytorch", None)])
def test_emulated_products_are_made_in_float32_on_a_cpu(kernel, reason, monkeypatch):
    monkeypatch.setattr("hasten.ops.linear.operator.emulated", lambda dtype: reason)
    monkeypatch.setenv("HASTEN_ISA", "none")
    request = LinearRequest(device=torch.device("cpu"), dtype=torch.bfloat16, format=INT8, in_features=64)
    assert pick(KERNELS, request).name == kernel
    others = dict(explain(KERNELS, request).others)
    assert others["float32" if reason is None else "pytorch"] == (
        reason or "bfloat16 needs no detour: its products are not emulated here"
    )
    elsewhere = replace(request, device=torch.device("meta"))
    assert pick(KERNELS, elsewhere).name == "pytorch", "what the processor emulates concerns no other device"


@needs_native
def test_a_row_whose_sum_could_overflow_is_not_for_the_native_kernel():
    """-128 times 127 in every place, of 32 bits."""
    request = LinearRequest(device=torch.device("cpu"), dtype=torch.bfloat16, format=INT8, in_features=1 << 17)
    unsupported = kernel_named("native").unsupported_reason
    assert unsupported(request) is None
    overflowing = replace(request, in_features=2**31 // (128 * 127) + 1)
    assert "not 132105" in unsupported(overflowing)
    assert unsupported(replace(overflowing, format=group_format("int8", 32))) is None, "with a sum for each group"


@needs_native
def test_groups_that_the_native_kernel_lacks_are_slow_with_a_warning():
    weight = make_weight(70, 96, format="int4", group_size=48)
    with pytest.warns(HastenWarning, match=r"'\w+' is used: its groups are multiples of 32, not 48"):
        assert PackedLinear.from_weight(weight).kernel in TORCHS
    assert PackedLinear.from_weight(weight, kernel="pytorch").kernel == "pytorch", "asked for: no warning"
