"""Weights rounded natively; hasten.quantization.rounding and hasten.quantization.gptq, the reference, call it."""
