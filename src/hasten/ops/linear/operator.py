"""The linear operator: y = x·Wᵀ + b, W in any format that a layout holds; its kernels in order of preference."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.machine import emulated
from hasten.ops import triton_support
from hasten.ops.linear.layouts import CHUNKS, PANELS, ROWS, Layout, Operands, Packed
from hasten.ops.linear.weights import BFLOAT16, INT8, PLAIN, QuantizedWeight, WeightFormat
from hasten.ops.linear.wide import in_pieces, wide_linear
from hasten.ops.native import library, missing_library, native_ops, slower_than_pytorch
from hasten.ops.panels import PADDING
from hasten.ops.picker import Kernel

TRITON_GROUPS = (32, 64, 128, 256)
NATIVE_DTYPES = (torch.bfloat16, torch.float32)  # of activations
TRITON_DTYPES = (torch.bfloat16, torch.float16)
MANY_ROWS = 4  # from which on PyTorch multiplies by quantized weights on a CPU in the activations' dtype
LARGEST_INT8_ROW = 1 << 17  # products of more values with one scale could overflow the 32-bit sum

Product = Callable[[Tensor, Operands], Tensor]  # x (…, K) -> y (…, N) in x's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRequest:
    """The request to a kernel: decided once per layer, when it is made or bound again.

    `dtype` is that of the activations, `format` the weight's.
    """

    device: torch.device
    dtype: torch.dtype
    format: WeightFormat
    in_features: int


def reference(x: Tensor, weight: Operands) -> Tensor:
    """Dequantize W from the rows layout to float32 and multiply in float32: slow, and obviously right."""
    bias, wide = None if weight.bias is None else weight.bias.float(), x.float()
    return F.linear(wide, _floats(wide, weight), bias).to(x.dtype)


def pytorch(x: Tensor, weight: Operands) -> Tensor:
    """PyTorch's product in x's dtype. int8 values are exact in it, so their scales multiply the outputs where a row has
    one (as gpt-fast does, which a compiler fuses); other weights are rounded to it first.

    On a CPU, but for compiled graphs, a piece of a quantized weight at a time becomes floats, which stay in the caches.
    With fewer than MANY_ROWS rows that takes longer than the product, and least in float32: all of it is then.

    torch._weight_int8pack_mm is not used: in torch 2.13 it crashes where K is not a multiple of 16.
    """
    quantized, dtype = bool(weight.format.scales), x.dtype
    piecewise = quantized and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if piecewise and x.numel() < MANY_ROWS * x.shape[-1]:
        x = x.float()
    if weight.format == INT8:
        assert weight.scales is not None
        y = wide_linear(x, weight.data, None) * weight.scales.flatten()
        return (y if weight.bias is None else y + weight.bias).to(dtype)
    if weight.data.dtype in PLAIN and x.dtype == torch.float32:
        return wide_linear(x, weight.data, weight.bias)
    bias = None if weight.bias is None else weight.bias.to(x.dtype)
    if piecewise:
        return in_pieces(x, weight.out_features, lambda rows: _floats(x, weight, rows), bias).to(dtype)
    return F.linear(x, _floats(x, weight), bias)


def float32(x: Tensor, weight: Operands) -> Tensor:
    """`pytorch` in float32, for a processor that only emulates products in x's dtype."""
    return pytorch(x.float(), weight).to(x.dtype)


def _floats(x: Tensor, weight: Operands, rows: slice = slice(None)) -> Tensor:
    """`rows` of W (N, K), which lies in the layout ROWS, in x's dtype."""
    if not weight.format.scales:
        return weight.data[rows].to(x.dtype)
    packed = Packed(*(None if tensor is None else tensor[rows] for tensor in weight[:4]))  # type: ignore[arg-type]
    return ROWS.rows(packed, weight.format, (len(packed.data), x.shape[-1]), None).dequantize(x.dtype)


def native_unsupported(request: LinearRequest) -> str | None:
    """Why the native kernel cannot serve a layer, or None."""
    if request.device.type not in ("cpu", "meta"):
        return f"it needs a CPU; the layer is on {request.device}"
    if request.dtype not in NATIVE_DTYPES:
        return f"it takes bfloat16 and float32 activations, not {str(request.dtype).removeprefix('torch.')}"
    if request.format.group_size % PADDING and len(request.format.scales) < 2:
        return f"its groups are multiples of {PADDING}, not {request.format.group_size}"
    if request.format == INT8 and request.in_features > LARGEST_INT8_ROW:
        return f"its int8 sums hold {LARGEST_INT8_ROW} products, not {request.in_features}"
    return missing_library()


def native_opt_in(request: LinearRequest) -> str | None:
    """Why PyTorch's product of bfloat16 weights is the better one on this processor, or None.

    By the time of a prompt of 64 rows and 16 single ones.
    """
    if request.format.element != "bfloat16" or request.device.type != "cpu":
        return None
    return slower_than_pytorch("products of 64 rows and 16 times one by 4096 × 1024 bfloat16 weights", _contenders)


def _contenders() -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    weight = QuantizedWeight.plain(torch.randn(4096, 1024, generator=generator).bfloat16())
    prompt = torch.randn(64, 1024, generator=generator).bfloat16()
    row = prompt[:1]

    def run(product: Product, layout: Layout) -> Callable[[], object]:
        packed = Operands(*layout.pack(weight), None, 4096, BFLOAT16)

        def call() -> object:
            with torch.inference_mode():
                return product(prompt, packed), [product(row, packed) for _ in range(16)]

        return call

    theirs = pytorch if emulated(torch.bfloat16) is None else float32
    return {"native": run(_native(), PANELS), "PyTorch's": run(theirs, ROWS)}


def _triton_unsupported(request: LinearRequest) -> str | None:
    if request.device.type == "cpu" and (reason := triton_support.refusal(request.device)) is not None:
        return reason
    if not request.format.scales:
        return f"PyTorch's own product is the best for {request.format.element} weights on a GPU"
    if request.dtype not in TRITON_DTYPES:
        return f"it takes bfloat16 and float16 activations, not {str(request.dtype).removeprefix('torch.')}"
    if (
        len(request.format.scales) > 1
        or request.format.element not in ("int8", "int4")
        or request.format.zero == "minimum"
    ):
        return f"it unpacks int8 and int4, not {request.format}"
    if request.format.group_size and request.format.group_size not in TRITON_GROUPS:
        return f"its groups are {', '.join(map(str, TRITON_GROUPS))}, not {request.format.group_size}"
    return triton_support.refusal(request.device)


def _float32_unsupported(request: LinearRequest) -> str | None:
    if request.device.type == "cpu" and emulated(request.dtype) is not None:
        return None
    return f"{str(request.dtype).removeprefix('torch.')} needs no detour: its products are not emulated here"


def _pytorch_opt_in(request: LinearRequest) -> str | None:
    return emulated(request.dtype) if request.device.type == "cpu" else None


def _native() -> Product:
    operator = native_ops().linear.default

    def product(x: Tensor, weight: Operands) -> Tensor:
        return operator(x, *weight[:6], weight.format.group_size, weight.planes)

    return product


def _triton() -> Product:
    # Imported here, because it imports Triton: only where the kernel is taken.
    from hasten.ops.linear.triton_linear import linear

    return linear


# `run` is called once, when a layer is bound, and returns the product that the layer then calls.
KERNELS: tuple[Kernel[LinearRequest], ...] = (
    Kernel("native", _native, native_unsupported, native_opt_in),
    Kernel("triton", _triton, _triton_unsupported),
    Kernel("float32", lambda: float32, _float32_unsupported),
    Kernel("pytorch", lambda: pytorch, lambda request: None, _pytorch_opt_in),
    Kernel("reference", lambda: reference, lambda request: None),
)


def takes(kernel: str, dtype: torch.dtype) -> bool:
    """Whether a kernel multiplies activations of a dtype."""
    own = {"native": NATIVE_DTYPES, "triton": TRITON_DTYPES}.get(kernel)
    return dtype.is_floating_point if own is None else dtype in own


def slow_for_its_format(request: LinearRequest) -> str | None:
    """Why a quantized layer on a CPU misses the native kernel, where that is for the weight's own sizes."""
    if not request.format.scales or request.device.type != "cpu" or request.dtype not in NATIVE_DTYPES:
        return None
    return native_unsupported(request) if library() is not None else None


def layout_of(kernel: str) -> Layout:
    """The layout of the weights that a kernel reads."""
    return {"native": PANELS, "triton": CHUNKS}.get(kernel, ROWS)
