"""Weights rounded natively; hasten.quantization.rounding and hasten.quantization.gptq are the reference, and call it."""
