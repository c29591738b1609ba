"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer where the config sets one."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, llama_config, window_of


def config(fields: Fields) -> ModelConfig:
    return llama_config(fields, window=window_of(fields))


DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
FAMILY = Family("mistral", "MistralForCausalLM", config, defaults=DEFAULTS)
