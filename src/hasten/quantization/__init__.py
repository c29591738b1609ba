"""How to choose the numbers of a quantized model: rounding, scale search, and what is quantized how."""

from hasten.quantization.quantize import LayerReport, quantize
from hasten.quantization.schemes import Int4, Int8, Scheme
from hasten.quantization.stream import quantize_to_folder

__all__ = ["Int4", "Int8", "LayerReport", "Scheme", "quantize", "quantize_to_folder"]
