"""Families that rotate neighbouring elements of a head together.

GLM-4-9B (arXiv 2406.12793): the first half of each head is rotated; gate and up stored fused. GLM-4-0414: with norms
also after attention and MLP. ERNIE 4.5: whole heads, and else Llama; its mixture of experts has experts from a layer
on, chosen with a bias.
"""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import LLAMA_NAMES, Family, expert_counts, gate_up_rows, layer_count, llama_config


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


def ernie_moe_config(fields: Fields) -> ModelConfig:
    fields.only(use_bias=False, compression_ratio=1.0)
    first = fields.integer("moe_layer_start_index", default=1, low=0)
    last = fields.integer("moe_layer_end_index", default=-1, low=-1)
    last = layer_count(fields) - 1 if last == -1 else last
    every = fields.integer("moe_layer_interval", default=1)
    size = fields.integer("moe_intermediate_size")
    return llama_config(
        fields,
        theta=500_000.0,
        rope_pairs=True,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        has_experts=lambda layer: first <= layer <= last and (layer + 1) % every == 0,
        **expert_counts(fields, "moe_num_experts", "num_experts", chosen_names=("moe_k", "num_experts_per_tok")),
        expert_size=size,
        expert_choice_bias=True,
        expert_sum_floor=fields.number("moe_norm_min", default=1e-12, high=1.0),
        shared_size=size * fields.integer("moe_num_shared_experts", default=0, low=0, high=1 << 8),
    )


ERNIE_MOE_NAMES = LLAMA_NAMES | {"choice_bias": "moe_statics.e_score_correction_bias"}
ERNIE_MOE_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
}
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ernie_moe_config,
    ERNIE_MOE_NAMES,
    defaults=ERNIE_MOE_DEFAULTS,
    one_row=("choice_bias",),
    in_memory=LLAMA_NAMES | {"choice_bias": "gate.moe_statics.e_score_correction_bias"},
)
