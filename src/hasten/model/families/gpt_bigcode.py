"""GPT-BigCode, StarCoder (arXiv 2305.06161): GPT-2 with one key/value head for all query heads (multi-query)."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, Places
from hasten.model.families.gpt2 import gpt_config, gpt_places


def config(fields: Fields) -> ModelConfig:
    heads = fields.integer("n_head", "num_attention_heads", high=1 << 12)
    return gpt_config(fields, kv_heads=1 if fields.flag("multi_query", True) else heads)


def places(config: ModelConfig) -> Places:
    return gpt_places(config, transposed=False, interleaved=config.kv_heads > 1)  # without multi-query


DEFAULTS = {"n_positions": 1024, "activation_function": "gelu_pytorch_tanh"}
FAMILY = Family("gpt_bigcode", "GPTBigCodeForCausalLM", config, places, base="transformer.", defaults=DEFAULTS)
