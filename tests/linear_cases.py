"""Random layers of every weight format, and how far products of them may be off."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from hasten.ops.linear import BFLOAT16, INT8, PackedLinear, QuantizedWeight
from hasten.ops.linear.weights import (
    FLOAT16,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TABLES,
    VALUE_DTYPES,
    fp8_format,
    group_format,
    minimum_format,
)

SIZES = st.integers(1, 200)
CASES = st.sampled_from(
    [
        ("bfloat16", 0, True, "float"),
        ("float16", 0, True, "float"),
        *(("int8", 0, True, activations) for activations in ("int8", "float")),
        *(
            (element, group, symmetric, activations)
            for element in ("int4", "int8")
            for group in (32, 64, 128)
            for symmetric in (True, False)
            for activations in ("int8", "float")
        ),
    ]
)
LAYERS = [
    ("bfloat16", 0, "float"),
    ("float16", 0, "float"),
    ("int8", 0, "int8"),
    ("int8", 0, "float"),
    ("int8", 32, "int8"),
    ("int4", 32, "int8"),
    ("int4", 32, "float"),
]
PACKED_FORMATS = {
    "fp8 row": fp8_format(),
    "fp8 g128": fp8_format(128),
    "fp8 g32": fp8_format(32),
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ4_XS": IQ4_XS,
    "Q4_1": minimum_format("int4"),
    "Q5_1": minimum_format("int5"),
    "Q5_0": group_format("int5", 32, scale_dtype=torch.float16),
    "int5 g128": group_format("int5", 128),
    "IQ4_NL": group_format("iq4", 32, scale_dtype=torch.float16),
    "MXFP4": MXFP4,
}
TORCHS = ("float32", "pytorch")  # whichever a processor multiplies faster


def make_weight(n, k, *, format=None, group_size=0, symmetric=True, scale_dtype=torch.float16, seed=0):
    """A random int8 or int4 weight (the latter where no format is named and there are groups), or a bfloat16 tensor."""
    generator = torch.Generator().manual_seed(seed)
    if format in ("bfloat16", "float16"):
        return torch.randn(n, k, generator=generator).to(getattr(torch, format))
    if not group_size:
        values = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
        return QuantizedWeight(format=INT8, values=values, scales=torch.rand(n, 1, generator=generator) + 0.1)
    size, element = (n, -(-k // group_size)), format or "int4"
    least, most, dtype = (-128, 128, torch.int8) if element == "int8" else (0, 16, torch.uint8)
    zeros = torch.randint(least, most, size, generator=generator).to(dtype)
    return QuantizedWeight(
        format=group_format(element, group_size, symmetric=symmetric, scale_dtype=scale_dtype),
        values=torch.randint(least, most, (n, k), generator=generator).to(dtype),
        scales=(torch.rand(size, generator=generator) + 0.1).to(scale_dtype),
        zeros=None if symmetric else zeros,
    )


def random_weight(name, n, k, seed=0):
    """Any numbers that one of PACKED_FORMATS can hold, but NaN and infinity."""
    format, generator = PACKED_FORMATS[name], torch.Generator().manual_seed(seed)

    def integers(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    def floats(*size):
        return torch.rand(size, generator=generator) + 0.1

    if name.startswith("fp8"):
        codes = integers(0, 256, n, k).to(torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0x38
        return QuantizedWeight(
            format=format, values=codes.view(torch.float8_e4m3fn), scales=floats(n, format.groups(k)) / 100
        )
    groups, element = (n, format.groups(k)), format.element
    if element in TABLES:
        values = torch.tensor(TABLES[element])[integers(0, 16, n, k)]
    else:
        values = integers(0, 1 << format.bits, n, k)
    values = values.to(VALUE_DTYPES[element])
    if len(format.scales) == 1:
        if format == MXFP4:
            scales = integers(110, 130, *groups).to(torch.uint8).view(format.scale_dtype)
        else:
            scales = floats(*groups).to(format.scale_dtype)
        zeros = None if format.symmetric else (floats(*groups) * 8 - 1).to(format.scale_dtype)
        return QuantizedWeight(format=format, values=values, scales=scales, zeros=zeros)
    outer = (floats(n, k // 256, 1 if format.symmetric else 2) * 1e-3).half()
    if format.symmetric:
        scales = integers(-128, 128, *groups).to(torch.int8)
        return QuantizedWeight(format=format, values=values, scales=scales, outer=outer)
    scales, minima = (integers(0, 16 if name == "Q2_K" else 64, *groups).to(torch.uint8) for _ in range(2))
    return QuantizedWeight(format=format, values=values, scales=scales, zeros=minima, outer=outer)


def whole(name, k):
    """k, or what rows of one of PACKED_FORMATS have of it: whole super-blocks."""
    return -(-k // 256) * 256 if len(PACKED_FORMATS[name].scales) > 1 else k


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
    if layer.format == FLOAT16:
        return rms(F.linear(x.half(), full.half()) - exact(weight, x))
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


def int4_weight(**changes):
    weight = make_weight(70, 65, format="int4", group_size=32, symmetric=False)
    return replace(weight, **changes)
