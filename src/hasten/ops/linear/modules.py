"""`PackedLinear`: a linear layer whose weight lies in memory as its kernel reads it, in any format that one takes."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError, HastenWarning
from hasten.ops.linear.blocks import GgufBlocks, pack_blocks
from hasten.ops.linear.gradient import frozen_product
from hasten.ops.linear.layouts import PANELS, Layout, Operands, Packed, empty_weight, pack_words, spread_words
from hasten.ops.linear.operator import KERNELS, LinearRequest, Product, layout_of, slow_for_its_format, takes
from hasten.ops.linear.weights import (
    FLOAT16,
    PLAIN,
    QuantizedWeight,
    WeightFormat,
    check_format,
    check_scales,
    check_weight,
)
from hasten.ops.native import native_ops
from hasten.ops.panels import PANEL, steps
from hasten.ops.picker import Kernel, pick

ACTIVATION_PLANES = {"int8": 1, "float": 2}


class PackedLinear(nn.Module):
    """y = x·Wᵀ + b for x (…, K), y (…, N) in x's dtype. The weight is frozen: only x has a gradient (gradient.py).

    format: BFLOAT16, FLOAT16, INT8, a `group_format`, `fp8_format` or one of GGUF's (weights.py). activations: "int8"
    rounds x to int8, by row or group as the weight has its scales, the fastest; "float" keeps 16 bits of it. Only the
    native kernel rounds. With weights of bfloat16 and fp8 it rounds a float32 x to bfloat16 where the processor
    multiplies such pairs (AVX-512 BF16, AMX), and keeps float32 elsewhere, as with weights of float16 everywhere.

    In a permuted format (the columns of a group are not neighbours) the columns are stored sorted by group, and the
    buffer `order` (K,) brings x's features into their order before the product.

    The buffers `data`, `scales`, `zeros` and `outer` hold the only copy, in the layout of the kernel that was picked
    (`layouts.py`; `kernel` forces one by name). What belongs into files is `to_weight()` or `dequantize()`,
    which are exact; the state dict is only for the same kernel. Made directly, the buffers are not initialised.

    `.to()`, `.cuda()`, `.half()` and the like pick the kernel again (a forced one stays if it can serve) and pack the
    weight for it, exactly; x then has the new device and dtype. No cast changes a number of the weight.

    A NaN or infinity in a row of x makes all outputs of that row NaN or infinite.
    """

    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    outer: Tensor | None
    bias: Tensor | None
    order: Tensor | None
    kernel: str
    _product: Product
    _native_rows: Callable[..., Tensor] | None  # of the native kernel

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: WeightFormat,
        *,
        bias: Tensor | bool | None = None,
        activations: str = "int8",
        dtype: torch.dtype = torch.bfloat16,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        pack: Callable[[Layout], Packed] | None = None,
    ) -> None:
        """`dtype`: of the activations to come (for picking the kernel). `bias`: its numbers, or True for zeros in this
        dtype. `pack` gives the buffers."""
        super().__init__()
        check_format(format)
        if activations not in ACTIVATION_PLANES:
            raise ConfigError(f"activations is {activations!r}; use {' or '.join(ACTIVATION_PLANES)}")
        if in_features < 1 or out_features < 1:
            raise ConfigError(f"a linear layer cannot have {in_features} inputs and {out_features} outputs")
        device = torch.empty(0, device=device).device
        self.in_features, self.out_features = in_features, out_features
        self.format, self.activations = format, activations
        self.planes = ACTIVATION_PLANES[activations]
        self.request = LinearRequest(device=device, dtype=dtype, format=format, in_features=in_features)
        chosen = pick(KERNELS, self.request, forced=kernel)
        native = chosen.name == "native"
        if kernel is None and not native and (reason := slow_for_its_format(self.request)) is not None:
            warnings.warn(f"the slower kernel {chosen.name!r} is used: {reason}", HastenWarning, stacklevel=3)
        self._use(chosen)
        self._hold((pack or self._pack_empty)(layout_of(self.kernel)))
        self.register_buffer("order", None)
        if isinstance(bias, bool):
            bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        if bias is not None:
            if tuple(bias.shape) != (out_features,):
                raise ConfigError(f"a bias of shape {tuple(bias.shape)} does not fit {out_features} outputs")
            kept = bias.dtype if bias.dtype in (torch.bfloat16, torch.float32) else torch.float32
            bias = bias.detach().to(kept).contiguous()
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, kernel: str | None = None) -> Self:
        """The same layer in bfloat16, to which its weights are rounded, or in float16, where they are, which takes
        float32."""
        if not isinstance(linear, nn.Linear):
            raise ConfigError(f"a packed layer is made of an nn.Linear; found {type(linear).__name__}")
        values = linear.weight.detach()
        weight = QuantizedWeight.plain(values if values.dtype in PLAIN else values.bfloat16())
        options: dict[str, Any] = {"kernel": kernel, "device": values.device, "bias": linear.bias}
        if weight.format == FLOAT16:
            options["dtype"] = torch.float32
        return cls(weight.shape[1], weight.shape[0], weight.format, pack=lambda layout: layout.pack(weight), **options)

    @classmethod
    def from_weight(cls, weight: QuantizedWeight, bias: Tensor | None = None, **options: Any) -> Self:
        """A layer of a quantized weight. Raises ConfigError for a weight whose parts do not fit together.

        options: activations, dtype and kernel, as above.
        """
        columns = weight.columns
        if columns is not None:
            order = columns.argsort(stable=True)
            format = replace(weight.format, permuted=False)
            weight = replace(weight, format=format, values=weight.values[:, order], columns=None)
        check_weight(weight)
        n, k = weight.shape
        options |= {"device": weight.values.device, "bias": bias}
        new = cls(k, n, weight.format, pack=lambda layout: layout.pack(weight), **options)
        if columns is not None:
            new.order = order.to(new.data.device)
        return new

    @classmethod
    def from_int4_words(
        cls, weight: QuantizedWeight, bias: Tensor | None = None, *, in_features: int, **options: Any
    ) -> Self:
        """A layer of a weight whose values are int32 words (N, ceil(K / 8)) as compressed-tensors stores them: nibble i
        of word j is value 8j + i, 0 … 15, or of fp4 its place in the TABLES. They are never spread to bytes for the
        native kernel.

        options: activations, dtype and kernel, as in `from_weight`.
        """
        words, format = weight.values, weight.format
        if words.dtype != torch.int32 or words.dim() != 2 or words.shape[1] != steps(in_features, 8):
            raise ConfigError(
                f"{in_features} {format.element} values take {steps(in_features, 8)} int32 words a row; "
                f"found {words.dtype} {tuple(words.shape)}"
            )
        check_format(format, "int4", "fp4")
        check_scales(format, (words.shape[0], format.groups(in_features)), weight.scales, weight.zeros)

        def pack(layout: Layout) -> Packed:
            return pack_words(weight) if layout is PANELS else layout.pack(spread_words(weight, in_features))

        return cls(in_features, words.shape[0], format, device=words.device, bias=bias, pack=pack, **options)

    @classmethod
    def from_blocks(cls, blocks: GgufBlocks, bias: Tensor | None = None, **options: Any) -> Self:
        """A layer of a weight in a GGUF file's blocks. For the native kernel they go to panels in one pass.

        options: activations, dtype and kernel, as in `from_weight`.
        """

        def pack(layout: Layout) -> Packed:
            return pack_blocks(blocks) if layout is PANELS else layout.pack(blocks.read(blocks.rows))

        return cls(blocks.in_features, len(blocks.rows), blocks.format, bias=bias, pack=pack, **options)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ConfigError(f"this layer takes {self.in_features} features; found x of shape {tuple(x.shape)}")
        if not takes(self.kernel, x.dtype):
            raise ConfigError(
                f"the kernel {self.kernel!r} of this layer takes no {str(x.dtype).removeprefix('torch.')} activations; "
                "convert x, or the layer with .to(dtype), which picks another kernel"
            )
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if x.requires_grad and torch.is_grad_enabled():
            return frozen_product(x, self._multiply, self._some_rows)
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        return self._product(x, self.operands)

    def _some_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as it lies here, columns in its own order; `start` is the first of a panel."""
        if self.kernel == "native":
            panels = start // PANEL, steps(stop - start, PANEL)
            columns = native_ops().transposed_panels(*self.packed, *panels, self.in_features, self.format.group_size)
            return columns.t()[: stop - start].to(dtype)
        return self._rows(torch.arange(start, stop, device=self.data.device)).dequantize(dtype)

    def to_weight(self) -> QuantizedWeight:
        """The quantized weight as it was given, bit for bit."""
        if not self.format.scales:
            raise ConfigError(f"a {self.format.element} layer holds no quantized weight; use dequantize()")
        return self.numbers()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that the layer multiplies with."""
        return self.numbers().dequantize(dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of the weight, as an embedding reads them: ids (…) -> (…, K)."""
        if self._native_rows is None or self.order is not None:
            self._check_rows(ids)
            return self.numbers(ids.flatten()).dequantize(dtype).view(*ids.shape, self.in_features)
        sizes = (self.out_features, self.in_features, self.format.group_size)
        try:
            found = self._native_rows(ids.contiguous(), self.data, self.scales, self.zeros, self.outer, *sizes)
        except RuntimeError:
            self._check_rows(ids)
            raise
        return found.to(dtype).view(*ids.shape, self.in_features)

    def _check_rows(self, ids: Tensor) -> None:
        if ids.device.type == "cpu" and ids.numel():
            least, most = (int(end) for end in ids.aminmax())
            if least < 0 or most >= self.out_features:
                raise ConfigError(f"this layer has the rows 0 to {self.out_features - 1}; found {least} to {most}")

    def bind(self, kernel: str | None = None) -> None:
        """Pick the kernel again, or force one by name; repacks the weight if the new kernel has another layout."""
        chosen = pick(KERNELS, self.request, forced=kernel)
        if layout_of(chosen.name) is not layout_of(self.kernel):
            self._hold(layout_of(chosen.name).pack(self._rows(None)))
        self._use(chosen)

    def _use(self, kernel: Kernel[LinearRequest]) -> None:
        """Look up what calls need once: this takes longer than the rows of an embedding."""
        self.kernel, self._product = kernel.name, kernel.run()
        self._native_rows = native_ops().unpacked_rows.default if kernel.name == "native" else None

    def extra_repr(self) -> str:
        activations = f", activations={self.activations}" if self.format.scales else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.element}, "
            f"group_size={self.format.group_size}{activations}, bias={self.bias is not None}, kernel={self.kernel}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the bound functions, which cannot be pickled."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_product", "_native_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.bind(self.kernel)

    def _rows(self, ids: Tensor | None) -> QuantizedWeight:
        size = self.out_features, self.in_features
        return layout_of(self.kernel).rows(self.packed, self.format, size, ids)

    def numbers(self, ids: Tensor | None = None) -> QuantizedWeight:
        """The rows `ids` (None: all) of the weight, plain or quantized, their columns as they were given."""
        weight = self._rows(ids)
        if self.order is None:
            return weight
        place = self.order.argsort()
        format, columns = replace(weight.format, permuted=True), place // weight.format.group_size
        return replace(weight, format=format, values=weight.values[:, place], columns=columns)

    @property
    def packed(self) -> Packed:
        """The weight in the kernel's layout."""
        return Packed(self.data, self.scales, self.zeros, self.outer)

    @property
    def operands(self) -> Operands:
        """The operands of a product beside x."""
        return Operands(*self.packed, self.bias, self.out_features, self.format, self.planes)

    def _pack_empty(self, layout: Layout) -> Packed:
        return layout.pack(empty_weight((self.out_features, self.in_features), self.format, self.request.device))

    def _hold(self, packed: Packed) -> None:
        for name, tensor in zip(Packed._fields, packed, strict=True):
            self.register_buffer(name, tensor)

    def hold_as_parameters(self) -> None:
        """Make frozen parameters of the weight's buffers: FSDP2 divides parameters alone. Its kernel stays as it is."""
        for name, tensor in zip(Packed._fields, self.packed, strict=True):
            if tensor is not None:
                delattr(self, name)
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if "data" in self._parameters:  # FSDP2 holds it, gathers it where the kernel is, and may keep shards elsewhere
            return super()._apply(fn, recurse)
        # What happens to an activation of this layer says where the layer goes and what it will be given.
        x = fn(torch.empty(0, dtype=self.request.dtype, device=self.data.device))

        def keep_dtype(tensor: Tensor) -> Tensor:  # the dtypes of a weight's parts belong to its format
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        dtype = x.dtype if x.dtype.is_floating_point else self.request.dtype
        request = replace(self.request, device=x.device, dtype=dtype)
        if request != self.request:
            forced = next((k for k in KERNELS if k.name == self.kernel != pick(KERNELS, self.request).name), None)
            self.request = request
            self.bind(forced.name if forced is not None and forced.unsupported_reason(request) is None else None)
        return self


def request_of(linear: nn.Linear | PackedLinear) -> LinearRequest:
    """The request of a layer to its kernel; of a plain one, the request that it would make if it were packed."""
    linear = getattr(linear, "base", linear)  # the layer that a LoRA adapter wraps
    if isinstance(linear, PackedLinear):
        return linear.request
    weight = linear.weight
    format = WeightFormat(element=str(weight.dtype).removeprefix("torch."))
    return LinearRequest(device=weight.device, dtype=weight.dtype, format=format, in_features=weight.shape[1])
