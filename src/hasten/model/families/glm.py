"""Families that rotate neighbouring elements of a head together.

GLM-4-9B (arXiv 2406.12793): the first half of each head is rotated; gate and up stored fused. GLM-4-0414: with norms
also after attention and MLP. ERNIE 4.5 (dense): whole heads, and else Llama.
"""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import LLAMA_NAMES, Family, gate_up_rows, llama_config


def glm_config(fields: Fields) -> ModelConfig:
    return llama_config(fields, rope_pairs=True, qkv_bias=fields.flag("attention_bias", True))


NAMES = LLAMA_NAMES | dict.fromkeys(("gate", "up"), "gate_up_proj")
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
GLM = Family("glm", "GlmForCausalLM", glm_config, NAMES, gate_up_rows, defaults=DEFAULTS)


def glm4_config(fields: Fields) -> ModelConfig:
    return llama_config(fields, rope_pairs=True, post_norms=True, qkv_bias=fields.flag("attention_bias", True))


GLM4_NAMES = NAMES | {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
GLM4 = Family("glm4", "Glm4ForCausalLM", glm4_config, GLM4_NAMES, gate_up_rows, defaults=DEFAULTS)


def ernie_config(fields: Fields) -> ModelConfig:
    fields.only(compression_ratio=1.0)
    bias, tied = fields.flag("use_bias", False), fields.flag("tie_word_embeddings", True)
    return llama_config(
        fields, theta=500_000.0, rope_pairs=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias, tie_embeddings=tied
    )


ERNIE_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", ernie_config, defaults=ERNIE_DEFAULTS)
