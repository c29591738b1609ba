"""Published layouts of quantized weights, and the record of what in a model is quantized."""
