"""Families with latent attention (MLA), whose cache keeps a narrow vector of each token instead of keys and values.

DeepSeek V2 (arXiv 2405.04434; the Lite model has queries without a latent of their own) and V3 (arXiv 2412.19437, and
Kimi K2), GLM 4.7 Flash, Mistral Small 4, and Youtu LLM, which has no experts.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hasten.model.config import Fields, LatentConfig, LayerConfig, ModelConfig, RopeConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
    Family,
    expert_counts,
    layer_count,
    llama_config,
    rope,
    rope_fields,
)
from hasten.model.families.routed import ROUTED_NAMES, expert_groups, routed
from hasten.model.families.slices import Stacks


def latent_config(fields: Fields, *, table: Mapping[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """The config of a model with latent attention. table: the rotary table of a config without one."""
    sizes = LatentConfig(
        rank=fields.integer("kv_lora_rank", high=1 << 11),
        query_rank=fields.integer("q_lora_rank", default=None),
        key_dim=fields.integer("qk_nope_head_dim", high=1 << 11),
        turned_dim=fields.integer("qk_rope_head_dim", high=1 << 11),
        value_dim=fields.integer("v_head_dim", high=1 << 11),
    )
    if sizes.turned_dim % 2:
        raise fields.fail("qk_rope_head_dim", "even", sizes.turned_dim)
    given = rope_fields(fields) or Fields(table or {}, fields.where)
    turned, factor = _rope(fields, sizes.turned_dim, given)
    layer = LayerConfig(scale=sizes.query_dim**-0.5 * factor**2)
    bias = fields.flag("attention_bias", False)
    # Each head has a key and a value, whatever num_key_value_heads says; a cache keeps one of both for all.
    own = Fields({**fields.values, "num_key_value_heads": 1, "head_dim": sizes.kept}, fields.where, fields.defaults)
    values: dict[str, Any] = {
        "layers": (layer,) * layer_count(fields),
        "ropes": (turned,),
        "rope_pairs": fields.flag("rope_interleave", True),
        "latent": sizes,
        "qkv_bias": bias,
        "output_bias": bias,
        "source": dict(fields.values),
    }
    return llama_config(own, **values | changes)


def _rope(fields: Fields, dim: int, given: Fields) -> tuple[RopeConfig, float]:
    """The rotary table of `dim` features, and the factor that its stretching gives queries and keys beside it."""
    # A part of a head is rotated, but a head of its own: what the file may say of the part is in the sizes.
    values = {name: value for name, value in given.values.items() if name != "partial_rotary_factor"}
    around = {name: value for name, value in fields.values.items() if name != "partial_rotary_factor"}
    inner = Fields(values, given.where)
    table = rope(Fields(around, fields.where, fields.defaults), dim, inner, theta=10_000.0)
    if beta := inner.number("llama_4_scaling_beta", default=0.0):
        original = inner.integer("original_max_position_embeddings", low=2, high=1 << 30)
        table = replace(table, query_beta=beta, original_positions=original)
    weight = 0.0 if table.scaling == "default" else inner.number("mscale_all_dim", default=0.0)
    stretch = inner.number("factor", default=1.0) if weight else 1.0
    return table, 0.1 * weight * math.log(stretch) + 1.0 if stretch > 1 else 1.0


def predictors(config: ModelConfig) -> tuple[str, ...]:
    """Layers behind the last one, which predict further tokens."""
    return tuple(f"{base}layers.{len(config.layers)}." for base in ("model.", ""))


NAMES = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
# Sizes of heads and latents that DeepSeek's config classes have by default.
SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def deepseek_v3_config(fields: Fields) -> ModelConfig:
    fields.only(scoring_func="sigmoid")
    return latent_config(fields, **routed(fields))


DEEPSEEK_V3_DEFAULTS = SIZES | {
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    deepseek_v3_config,
    ROUTED_NAMES | NAMES,
    defaults=DEEPSEEK_V3_DEFAULTS,
    unused=predictors,
)


def deepseek_v2_config(fields: Fields) -> ModelConfig:
    fields.only(scoring_func="softmax", moe_layer_freq=1, mlp_bias=False, norm_topk_prob=False)
    counts = expert_counts(fields, "n_routed_experts", "num_experts")
    size, dense = fields.integer("moe_intermediate_size"), fields.integer("first_k_dense_replace", low=0)
    grouped = fields.choice("topk_method", options={"greedy": False, "group_limited_greedy": True}, default="greedy")
    return latent_config(
        fields,
        rope_pairs=True,
        has_experts=lambda layer: layer >= dense,
        expert_size=size,
        normalize_experts=False,
        expert_weight_scale=fields.number("routed_scaling_factor", default=1.0),
        shared_size=size * fields.integer("n_shared_experts", high=1 << 8),
        expert_group_scores=1,
        **counts,
        **(expert_groups(fields, counts) if grouped else {}),
    )


DEEPSEEK_V2_DEFAULTS = SIZES | {
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
}
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    deepseek_v2_config,
    LLAMA_NAMES | NAMES,
    defaults=DEEPSEEK_V2_DEFAULTS,
)


def glm4_moe_lite_config(fields: Fields) -> ModelConfig:
    fields.only(scoring_func="sigmoid")
    count, kinds = layer_count(fields), fields.value("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (count - 1)
    elif not isinstance(kinds, list) or len(kinds) != count or any(one not in ("dense", "sparse") for one in kinds):
        raise fields.fail("mlp_layer_types", f"a list of {count} of dense, sparse", kinds)
    experts = routed(fields) | {"has_experts": lambda layer: kinds[layer] == "sparse"}
    return latent_config(fields, **experts)


GLM4_MOE_LITE_DEFAULTS = DEEPSEEK_V3_DEFAULTS | {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    glm4_moe_lite_config,
    ROUTED_NAMES | NAMES,
    defaults=GLM4_MOE_LITE_DEFAULTS,
    unused=predictors,
)


def mistral4_config(fields: Fields) -> ModelConfig:
    experts = routed(fields) | {"expert_scores": "softmax", "expert_choice_bias": False}
    return latent_config(fields, table=MISTRAL4_ROPE, **experts)


# The rotary table of a config without one.
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4_DEFAULTS = SIZES | {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1 << 20,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
MISTRAL4 = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    mistral4_config,
    LLAMA_NAMES | NAMES,
    defaults=MISTRAL4_DEFAULTS,
    stacks=Stacks("experts.gate_up_proj", "experts.down_proj"),
)


def youtu_config(fields: Fields) -> ModelConfig:
    width = fields.integer("hidden_size")
    spread = fields.number("initializer_range", default=2 / (5 * width) ** 0.5, high=100.0)
    return latent_config(fields, tie_embeddings=fields.flag("tie_word_embeddings", True), initializer_range=spread)


YOUTU_DEFAULTS = SIZES | {"max_position_embeddings": 131_072}
YOUTU = Family("youtu", "YoutuForCausalLM", youtu_config, LLAMA_NAMES | NAMES, defaults=YOUTU_DEFAULTS)
