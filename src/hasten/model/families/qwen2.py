"""Qwen 2 and 2.5 (arXiv 2407.10671): Llama with biases on q, k and v, and a window in the later layers if enabled."""

from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import Family, layer_count, layers_of_kinds, llama_config, window_of


def windowed_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window`; `layer_types` says so where it is given."""
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", low=0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layer_count(fields))]
    return layers_of_kinds(fields, kinds, window=window)


def config(fields: Fields) -> ModelConfig:
    return llama_config(fields, qkv_bias=True, layers=windowed_layers(fields))


DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILY = Family("qwen2", "Qwen2ForCausalLM", config, defaults=DEFAULTS)
