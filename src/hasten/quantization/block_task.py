"""One block during calibration: the layers to quantize, their inputs, and the layers quantized so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.layer_format import LayerFormat, held_format, regrouped
from hasten.ops.linear import PackedEmbedding, PackedLinear, QuantizedWeight
from hasten.quantization.report import LayerReport, compare
from hasten.quantization.rounding import Grid, Search, round_weight
from hasten.quantization.walk import Call


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The quantized layers of a block by their names in the model, with a report of each."""

    weights: dict[str, QuantizedWeight]
    reports: list[LayerReport]

    def to(self, device: torch.device) -> "BlockResult":
        """The same result on another device."""
        weights = {name: weight.map(lambda tensor: tensor.to(device)) for name, weight in self.weights.items()}
        return BlockResult(weights, self.reports)


@dataclass(slots=True)
class BlockTask:
    """One block during calibration: `block` is a copy whose layers are replaced one by one, `before` the original.

    layers: formats by the layers' names in the block. calls run a block on the outputs of the quantized blocks before
    it, a few samples each; calls_before on those of the original blocks (needed by GPTAQ; else None). prefix: the
    block's name in the model; empty for the head.
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
        """Round a layer to nearest."""
        return round_weight(self.weight(name), self.layers[name].weight, search=self.search)

    def grid(self, name: str) -> Grid:
        """The rounding grid of a layer's format."""
        return Grid(self.layers[name].weight, self.search)

    def place(
        self,
        name: str,
        weight: QuantizedWeight,
        *,
        output_error: float | None = None,
        nearest_output_error: float | None = None,
        note: str = "",
    ) -> None:
        """Replace a layer by its quantized form, which rounds activations if its format does, and report it."""
        layer = self.layers[name]
        linear = self.before.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        self.block.set_submodule(name, served(weight, linear, linear.bias, layer, self.dtype))
        self.weights[name] = weight
        report = compare(self.prefix + name, linear.weight, weight, layer)
        report = replace(report, output_error=output_error, nearest_output_error=nearest_output_error, note=note)
        self.reports.append(report)

    def result(self) -> BlockResult:
        """The quantized layers, and their reports."""
        return BlockResult({self.prefix + name: weight for name, weight in self.weights.items()}, self.reports)


def served(weight: QuantizedWeight, old: Any, bias: Tensor | None, layer: LayerFormat, dtype: torch.dtype) -> nn.Module:
    """Build the layer of a quantized weight, packed for its kernel."""
    if (held := held_format(weight.format)) not in (None, weight.format):
        weight = regrouped(weight, held)  # one scale a row, repeated for groups that kernels support; 3 bits as 4
    if isinstance(old, nn.Embedding):
        return PackedEmbedding.from_weight(weight, dtype=dtype)
    return PackedLinear.from_weight(weight, bias, activations=layer.activations, dtype=dtype)
