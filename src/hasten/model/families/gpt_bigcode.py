"""GPT-BigCode, StarCoder (arXiv 2305.06161): GPT-2 with one key/value head for all query heads (multi-query)."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, RowSlice, qkv_rows
from hasten.model.families.gpt2 import GPT_NAMES, gpt_config


def config(fields: Fields) -> ModelConfig:
    heads = fields.integer("n_head", "num_attention_heads", high=1 << 12)
    return gpt_config(fields, kv_heads=1 if fields.flag("multi_query", True) else heads)


def rows(config: ModelConfig) -> dict[str, RowSlice]:
    return qkv_rows(config, groups=config.heads if config.kv_heads > 1 else 1)  # without multi-query head by head


DEFAULTS = {"n_positions": 1024, "activation_function": "gelu_pytorch_tanh"}
FAMILY = Family("gpt_bigcode", "GPTBigCodeForCausalLM", config, GPT_NAMES, rows, defaults=DEFAULTS)
