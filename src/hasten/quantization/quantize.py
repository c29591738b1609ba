"""`hasten.quantize`: a loaded model's linear layers quantized one after the other, in place or into a folder."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.export import Quantized, export_model
from hasten.model.formats.record import LayerFormat
from hasten.model.require import require_model
from hasten.model.transformer import Transformer
from hasten.ops.linear.modules import PackedLinear
from hasten.ops.linear.weights import QuantizedWeight
from hasten.quantization.blocks import each_block
from hasten.quantization.schemes import Int4, Int8, Scheme, layer_formats


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer that was quantized. relative_error: root mean square of what rounding changed over that of the weight.

    bytes_before and bytes_after count the weight's numbers, scales and zeros (4 bits are half a byte).
    """

    name: str
    format: LayerFormat
    relative_error: float
    bytes_before: int
    bytes_after: int


@torch.no_grad()
def quantize(model: Transformer, scheme: Scheme, *, report: Callable[[LayerReport], None] | None = None) -> Transformer:
    """Quantize a model for inference, in place; returns the same model.

    Each layer's original weight is let go as soon as its packed form is there, so that the peak is about one layer over
    the model. An lm_head tied to the embedding becomes a matrix of its own; the embedding stays as it is. `report` is
    called after each layer (and costs a comparison of each).

    Raises ConfigError for a model that is quantized or fused already, or whose weights hold NaN or infinity.
    """
    formats = check_quantizable(model, scheme)
    done: dict[str, LayerFormat] = {}
    for name, layer in formats.items():
        weight = round_layer(model, name, scheme, layer, report)
        linear: Any = model.get_submodule(name)
        packed = PackedLinear.from_weight(weight, linear.bias, activations=layer.activations, dtype=model.compute_dtype)
        model.set_submodule(name, packed)
        del linear, weight
        # Said layer by layer: after an interruption the model is half quantized, and says so.
        done[name] = layer
        model.quantization = dict(done)
    if "head" in formats:
        model.config = replace(model.config, tie_embeddings=False)
    return model


@torch.no_grad()
def quantize_to_folder(
    model: Transformer, scheme: Scheme, folder: Path, *, report: Callable[[LayerReport], None] | None = None
) -> None:
    """Write `model` quantized, as a folder of the layout that `hasten.model.formats` describes; it is not changed.

    From file to file, layer by layer: a loaded model's weights are mapped from its files, so that the peak is the
    input's pages and about one layer (the largest: often the lm_head). `report` is called for each layer as it is
    written. The folder is written whole or not at all. Raises ConfigError as `quantize` does, CheckpointError where the
    folder cannot be written.
    """
    formats = check_quantizable(model, scheme)

    def weight(name: str) -> QuantizedWeight:
        return round_layer(model, name, scheme, formats[name], report)

    export_model(model, folder, quantized=Quantized(formats, weight))


def check_quantizable(model: Transformer, scheme: Scheme) -> dict[str, LayerFormat]:
    """The layers the scheme quantizes; ConfigError where the scheme is none or the model cannot be quantized."""
    require_model(model, "hasten.quantize")
    if not isinstance(scheme, Int8 | Int4):
        raise ConfigError(f"a scheme is hasten.Int8(...) or hasten.Int4(...); found {type(scheme).__name__}")
    if model.quantization is not None:
        raise ConfigError("this model is quantized already; quantize the original checkpoint instead")
    if not model.readable:
        raise ConfigError("this model is fused; call hasten.unfuse(model) first, and hasten.fuse(model) afterwards")
    return layer_formats(model, scheme)


def round_layer(
    model: Transformer, name: str, scheme: Scheme, layer: LayerFormat, report: Callable[[LayerReport], None] | None
) -> QuantizedWeight:
    """Choose a layer's numbers and report them; an error names the layer."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    try:
        quantized = scheme.round(linear.weight.detach(), layer.weight)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if report is not None:
        report(compare(name, linear.weight, quantized, layer))
    return quantized


def compare(name: str, weight: Tensor, quantized: QuantizedWeight, layer: LayerFormat) -> LayerReport:
    """What quantizing a weight cost and saved."""
    n, k = quantized.shape
    zeros = 0 if quantized.zeros is None else quantized.zeros.numel() // 2
    return LayerReport(
        name=name,
        format=layer,
        relative_error=relative_error(weight.detach(), quantized),
        bytes_before=weight.nbytes,
        bytes_after=n * k * quantized.format.bits // 8 + quantized.scales.nbytes + zeros,
    )


def relative_error(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Root mean square of the difference to a weight (N, K), over the weight's own; 0 for a weight of zeros."""
    n, k = quantized.shape
    sums: dict[int, tuple[float, float]] = {}

    def work(rows: slice) -> None:
        exact = weight[rows].float()
        wrong = torch.linalg.vector_norm(quantized.rows(rows).dequantize() - exact)
        sums[rows.start] = float(wrong) ** 2, float(torch.linalg.vector_norm(exact)) ** 2

    each_block(n, k, work)
    wrong, total = (math.fsum(column) for column in zip(*sums.values(), strict=True))
    return math.sqrt(wrong / total) if total else 0.0
