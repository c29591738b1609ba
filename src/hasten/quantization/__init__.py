"""How to choose the numbers of a quantized model: rounding, scale search, and what is quantized how."""
