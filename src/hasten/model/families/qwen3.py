"""Qwen 3 (arXiv 2505.09388): Llama with an RMSNorm on each query and key head, and an explicit head size."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, llama_config
from hasten.model.families.qwen2 import DEFAULTS, windowed_layers


def config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return llama_config(fields, qk_norm=True, qkv_bias=bias, output_bias=bias, layers=windowed_layers(fields))


FAMILY = Family("qwen3", "Qwen3ForCausalLM", config, defaults=DEFAULTS | {"head_dim": 128})
