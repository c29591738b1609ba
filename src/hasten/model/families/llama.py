"""Llama 1, 2, 3 and 3.x (arXiv 2302.13971, 2307.09288, 2407.21783)."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, llama_config


def config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return llama_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


FAMILY = Family("llama", "LlamaForCausalLM", config, defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6})
