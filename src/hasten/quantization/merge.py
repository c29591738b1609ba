"""`merge`: add an adapter to the weights of its model; quantized ones are rounded again, and the cost is reported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoints.export import Quantized, export_model, held_layers
from hasten.errors import ConfigError
from hasten.model.lora import Adapter
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear, QuantizedWeight
from hasten.quantization.rounding import round_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedLayer:
    """A quantized layer whose merged weight was rounded.

    lost: root mean square of the rounding error over that of the adapter's addition; from 1 on the error is as large.
    relative_error: the same over the weight.
    """

    name: str
    lost: float
    relative_error: float


@torch.no_grad()
def merge(model: Transformer, adapter: Adapter, folder: Path, *, dtype: torch.dtype | None = None) -> list[MergedLayer]:
    """Write a model (not fused) with W + s·B·A in place of W, computed in float64 and rounded once.

    dtype: of the weights that are not quantized; by default each weight's own. The model is not changed.

    Layers in int8 or int4 are rounded to nearest in their own format, and what that costs is returned. Raises
    ConfigError for formats that hasten does not round to, CheckpointError where the folder cannot be written.
    """
    stored = held_layers(model)
    layers = {} if stored is None else stored.layers
    reports: list[MergedLayer] = []

    def weight(name: str) -> QuantizedWeight:
        held: Any = model.get_submodule(name)
        if name not in adapter:
            assert stored is not None
            return stored.weight(name)
        if layers[name].weight.permuted:
            raise ConfigError(f"{name}: its groups are permuted (desc_act), which hasten does not round to")
        delta = adapter[name].delta
        merged = (held.dequantize().double() + delta).float()
        rounded = round_weight(merged, layers[name].weight, search="mse")
        off = (rounded.dequantize() - merged).norm().item()
        if all(one.name != name for one in reports):
            lost = off / max(delta.norm().item(), 1e-30)
            reports.append(MergedLayer(name=name, lost=lost, relative_error=off / max(merged.norm().item(), 1e-30)))
        return rounded

    def changed(ours: str) -> Tensor | None:
        """Compute an adapted weight when it is written; None for other weights."""
        name = ours.removesuffix(".weight")
        if name not in adapter:
            return None
        layer: Any = model.get_submodule(name)
        packed = isinstance(layer, PackedLinear)
        plain: Tensor = layer.dequantize() if packed else layer.weight.detach()
        own = model.dtype if packed else plain.dtype
        return (plain.double() + adapter[name].delta).to(dtype or own)

    export_model(model, folder, dtype=dtype, quantized=Quantized(layers, weight, changed))
    return reports
