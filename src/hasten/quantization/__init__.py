"""How to choose the numbers of a quantized model: rounding, scale search, and what is quantized how."""

from hasten.quantization.quantize import LayerReport, quantize, quantize_to_folder
from hasten.quantization.schemes import Int4, Int8, Scheme

__all__ = ["Int4", "Int8", "LayerReport", "Scheme", "quantize", "quantize_to_folder"]
