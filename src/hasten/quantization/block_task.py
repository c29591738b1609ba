"""One block at work: the layers to quantize, what they are given, and what has been placed so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.layer_format import LayerFormat, held_format, regrouped
from hasten.ops.linear import PackedEmbedding, PackedLinear, QuantizedWeight
from hasten.quantization.report import LayerReport, compare
from hasten.quantization.rounding import Grid, Search, round_weight
from hasten.quantization.schemes import KERNEL_BITS
from hasten.quantization.walk import Call, shared_copy


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The quantized layers of a block, by their names in the model, and a report of each."""

    weights: dict[str, QuantizedWeight]
    reports: list[LayerReport]

    def to(self, device: torch.device) -> "BlockResult":
        """The same on another device."""
        weights = {name: weight.map(lambda tensor: tensor.to(device)) for name, weight in self.weights.items()}
        return BlockResult(weights, self.reports)


@dataclass(slots=True)
class BlockTask:
    """One block at work: `block` is a copy in which layers are replaced as they are done, `before` the block as it was.

    layers: by their names in the block. calls run a block on the quantized blocks' outputs, a few samples each;
    calls_before on those of the model before (GPTAQ alone needs them; else None). prefix: the block's name in the
    model; empty for the head.
    """

    block: nn.Module
    before: nn.Module
    layers: Mapping[str, LayerFormat]
    calls: Sequence[Call]
    calls_before: Sequence[Call] | None
    search: Search
    dtype: torch.dtype
    prefix: str
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)

    def weight(self, name: str) -> Tensor:
        """A layer's weight before quantization (N, K)."""
        linear = self.before.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear.weight.detach()

    def nearest(self, name: str) -> QuantizedWeight:
        """The layer rounded to nearest."""
        return round_weight(self.weight(name), self.layers[name].weight, search=self.search)

    def grid(self, name: str) -> Grid:
        """The integers of a layer's format."""
        return Grid(self.layers[name].weight, self.search)

    def place(self, name: str, weight: QuantizedWeight, **report: Any) -> None:
        """Replace a layer by its quantized form, as it will be served: rounding activations, where its format does.

        report: what only the method can say of it, `output_error`, `nearest_output_error` and `note`.
        """
        layer = self.layers[name]
        linear = self.before.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        self.block.set_submodule(name, served(weight, linear, linear.bias, layer, self.dtype))
        self.weights[name] = weight
        self.reports.append(compare(self.prefix + name, linear.weight, weight, layer, **report))

    def result(self) -> BlockResult:
        """What has become of the block."""
        return BlockResult({self.prefix + name: weight for name, weight in self.weights.items()}, self.reports)


def served(weight: QuantizedWeight, old: Any, bias: Tensor | None, layer: LayerFormat, dtype: torch.dtype) -> nn.Module:
    """A layer of a quantized weight as it is run: packed for its kernel, or plain where no kernel takes the format."""
    if weight.format.bits in KERNEL_BITS:
        if (held := held_format(weight.format)) not in (None, weight.format):
            weight = regrouped(weight, held)  # one scale a row, in groups that kernels know
        if isinstance(old, nn.Embedding):
            return PackedEmbedding.from_weight(weight, dtype=dtype)
        return PackedLinear.from_weight(weight, bias, activations=layer.activations, dtype=dtype)
    plain = shared_copy(old)
    plain.weight = nn.Parameter(weight.dequantize(old.weight.dtype), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
