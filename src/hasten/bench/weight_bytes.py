"""Bytes of a model's weights in a format that they are not in yet."""

from dataclasses import replace

from hasten.model.config import ModelConfig
from hasten.planning.cost import head_products, matrices, parameters


def weight_bytes(config: ModelConfig, weights: str) -> int:
    """Bytes of all weights in a format; the head of a quantized model is in int8, the embedding as it is."""
    from hasten.ops.linear.weights import INT4_GROUP, INT8, int4_format
    from hasten.quantization.schemes import tied_head_group  # both only here: they take a while to import

    count, (kind, _, group) = parameters(config), weights.partition("-g")
    plain = 4 if weights == "float32" else 2
    if kind not in ("int8", "int4"):
        return plain * count.total
    width, head = config.hidden_size, count.embedding
    inside = sum(matrices(config, layer)[0] for layer in config.layers) - len(config.layers) * head_products(config)
    blocks = int4_format(int(group or INT4_GROUP))
    outside = INT8
    if kind == "int8" and config.tie_embeddings:
        outside = replace(INT8, scales=int4_format(tied_head_group(width)).scales)
    packed = outside.bits_of(width) * head + (INT8 if kind == "int8" else blocks).bits_of(width) * inside
    return int(packed / 8) + plain * (count.total - inside - head)
