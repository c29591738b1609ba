"""Quantizing a model into a folder without ever holding the quantized model: layer by layer, from file to file."""

from collections.abc import Callable
from pathlib import Path

import torch

from hasten.model.export import Quantized, export_model
from hasten.model.transformer import Transformer
from hasten.ops.linear import QuantizedWeight
from hasten.quantization.quantize import LayerReport, check_quantizable, round_layer
from hasten.quantization.schemes import Scheme


@torch.no_grad()
def quantize_to_folder(
    model: Transformer, scheme: Scheme, folder: Path, *, report: Callable[[LayerReport], None] | None = None
) -> None:
    """Write `model` quantized, as a folder of the layout that `hasten.model.formats` describes; it is not changed.

    A loaded model's weights are mapped from its files, so that the peak is the input's pages and about one layer (the
    largest: often the lm_head). `report` is called for each layer as it is written. The folder is written whole or not
    at all. Raises ConfigError as `hasten.quantize` does, CheckpointError where the folder cannot be written.
    """
    formats = check_quantizable(model, scheme)

    def weight(name: str) -> QuantizedWeight:
        return round_layer(model, name, scheme, formats[name], report)

    export_model(model, folder, quantized=Quantized(formats, weight))
