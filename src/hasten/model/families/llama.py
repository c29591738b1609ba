"""Llama 1, 2, 3 and 3.x (arXiv 2302.13971, 2307.09288, 2407.21783), and what changes little of it.

Mistral (arXiv 2310.06825): a sliding window in every layer where the config sets one; Ministral: in the layers that it
names; Ministral 3 and Devstral 2: queries scaled by their position. Mixtral (arXiv 2401.04088):
Mistral with eight experts a layer, two for each token. Phi 3, 3.5 and 4-mini (arXiv 2404.14219): q, k, v and gate, up
stored fused, and longrope.
"""

from dataclasses import replace

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
    Family,
    expert_counts,
    gate_up_rows,
    layer_count,
    layers_of_kinds,
    llama_config,
    qkv_rows,
    rope,
    rope_fields,
    sizes,
    window_of,
)
from hasten.model.families.slices import RowSlice


def config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return llama_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


LLAMA = Family("llama", "LlamaForCausalLM", config, defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6})


def mistral_config(fields: Fields) -> ModelConfig:
    return llama_config(fields, window=window_of(fields))


MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
MISTRAL = Family("mistral", "MistralForCausalLM", mistral_config, defaults=MISTRAL_DEFAULTS)


def ministral_config(fields: Fields) -> ModelConfig:
    window = window_of(fields)
    kinds = ["full_attention" if window is None else "sliding_attention"] * layer_count(fields)
    return llama_config(fields, layers=layers_of_kinds(fields, kinds, window=window))


MINISTRAL = Family("ministral", "MinistralForCausalLM", ministral_config, defaults=MISTRAL_DEFAULTS)


# The rotary table of a config without one.
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3_config(fields: Fields) -> ModelConfig:
    given = rope_fields(fields) or Fields(MINISTRAL3_ROPE, fields.where)
    table = rope(fields, sizes(fields)["head_dim"], given, theta=10_000.0)
    beta = given.number("llama_4_scaling_beta", default=0.0)
    if beta:
        original = given.integer("original_max_position_embeddings", low=2, high=1 << 30)
        table = replace(table, query_beta=beta, original_positions=original)
    return llama_config(fields, window=window_of(fields), ropes=(table,))


MINISTRAL3_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", ministral3_config, defaults=MINISTRAL3_DEFAULTS)


def mixtral_config(fields: Fields) -> ModelConfig:
    return llama_config(
        fields,
        theta=1_000_000.0,
        window=window_of(fields),
        has_experts=lambda layer: True,
        **expert_counts(fields, "num_local_experts", "num_experts"),
        expert_size=fields.integer("intermediate_size"),
    )


MIXTRAL_NAMES = LLAMA_NAMES | {"mlp": "block_sparse_moe", "gate": "w1", "down": "w2", "up": "w3"}

MIXTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    mixtral_config,
    MIXTRAL_NAMES,
    defaults=MIXTRAL_DEFAULTS,
    in_memory=LLAMA_NAMES,
)


def phi3_config(fields: Fields) -> ModelConfig:
    # Early files call their longrope "su" or "yarn".
    kinds = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
    return llama_config(fields, window=window_of(fields), rope_kinds=kinds)


PHI3_NAMES = LLAMA_NAMES | dict.fromkeys("qkv", "qkv_proj") | dict.fromkeys(("gate", "up"), "gate_up_proj")


def phi3_rows(config: ModelConfig) -> dict[str, RowSlice]:
    return qkv_rows(config) | gate_up_rows(config)


PHI3_DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
PHI3 = Family("phi3", "Phi3ForCausalLM", phi3_config, PHI3_NAMES, phi3_rows, defaults=PHI3_DEFAULTS)
