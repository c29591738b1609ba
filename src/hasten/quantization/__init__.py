"""Quantization: rounding, the search for scales, calibration, and the formats of a model's layers."""

from hasten.quantization.calibration import calibration_tokens
from hasten.quantization.gptq import GPTQ
from hasten.quantization.quantize import quantize, quantize_to_folder
from hasten.quantization.report import LayerReport
from hasten.quantization.schemes import Int2, Int3, Int4, Int8, Mixed, Scheme

__all__ = [
    "GPTQ",
    "Int2",
    "Int3",
    "Int4",
    "Int8",
    "LayerReport",
    "Mixed",
    "Scheme",
    "calibration_tokens",
    "quantize",
    "quantize_to_folder",
]
