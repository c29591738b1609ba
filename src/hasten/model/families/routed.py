"""Families whose router scores each expert by itself and chooses with a bias (DeepSeek-V3, arXiv 2412.19437).

dots.llm1 (arXiv 2506.05767): Qwen 3 with dense layers first, then experts with a shared MLP. GLM 4.5 to 4.7 (arXiv
2508.06471): half of each head rotated, and norms of queries and keys in the larger models. MiniMax M2: norms over all
heads of the queries and of the keys, no shared MLP.
"""

from typing import Any

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
    Family,
    expert_counts,
    layer_count,
    layers_of_kinds,
    llama_config,
    rope,
    rope_fields,
    sizes,
    window_of,
)


def expert_groups(fields: Fields, counts: dict[str, Any]) -> dict[str, Any]:
    """`n_group` groups of experts, of which `topk_group` are kept for a token; all are as good as none."""
    experts, chosen = counts["experts"], counts["experts_per_token"]
    groups = fields.integer("n_group", default=1, high=1 << 12)
    if groups == 1:
        return {}
    if experts % groups or experts // groups < 2:
        raise fields.fail("n_group", f"a number of equal groups of at least 2 of the {experts} experts", groups)
    kept = fields.integer("topk_group", default=1, high=1 << 12)
    if kept > groups or kept * (experts // groups) < chosen:
        wanted = f"at most the {groups} groups, with at least {chosen} experts (num_experts_per_tok)"
        raise fields.fail("topk_group", wanted, kept)
    return {} if kept == groups else {"expert_groups": groups, "expert_top_groups": kept}


def routed(fields: Fields) -> dict[str, Any]:
    """Experts after the first dense layers, as in DeepSeek-V3."""
    fields.only(topk_method="noaux_tc", moe_layer_freq=1)
    counts = expert_counts(fields, "n_routed_experts", "num_local_experts")
    size = fields.integer("moe_intermediate_size")
    dense = fields.integer("first_k_dense_replace", default=0, low=0)
    return counts | {
        "has_experts": lambda layer: layer >= dense,
        "expert_size": size,
        "expert_scores": "sigmoid",
        "expert_choice_bias": True,
        "normalize_experts": fields.flag("norm_topk_prob", False),
        "expert_weight_scale": fields.number("routed_scaling_factor", default=1.0),
        "shared_size": size * fields.integer("n_shared_experts", high=1 << 8),
        **expert_groups(fields, counts),
    }


def dots1_config(fields: Fields) -> ModelConfig:
    # The published files call this scoring "noaux_tc".
    fields.choice("scoring_func", options={"sigmoid": "sigmoid", "noaux_tc": "sigmoid"}, default="sigmoid")
    bias, window = fields.flag("attention_bias", False), window_of(fields)
    first = fields.integer("max_window_layers", low=0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layer_count(fields))]
    layers = layers_of_kinds(fields, kinds, window=window)
    return llama_config(fields, layers=layers, qk_norm="head", qkv_bias=bias, output_bias=bias, **routed(fields))


ROUTED_NAMES = LLAMA_NAMES | {"choice_bias": "gate.e_score_correction_bias"}
DOTS1_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
}
DOTS1 = Family("dots1", "Dots1ForCausalLM", dots1_config, ROUTED_NAMES, defaults=DOTS1_DEFAULTS)


def glm4_moe_config(fields: Fields) -> ModelConfig:
    fields.only(scoring_func="sigmoid")
    qk_norm = "head" if fields.flag("use_qk_norm", False) else None
    return llama_config(fields, qk_norm=qk_norm, qkv_bias=fields.flag("attention_bias", False), **routed(fields))


GLM4_MOE_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", glm4_moe_config, ROUTED_NAMES, defaults=GLM4_MOE_DEFAULTS)


def minimax_m2_config(fields: Fields) -> ModelConfig:
    fields.only(scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0)
    fields.only(use_qk_norm=True, qk_norm_type="per_layer", attn_type_list=[1] * layer_count(fields))
    fields.only(layernorm_full_attention_beta=1.0, layernorm_mlp_beta=1.0)
    size = sizes(fields)["head_dim"]
    turned = fields.integer("rotary_dim", default=None, high=size)
    factor: dict[str, Any] = {} if turned is None else {"partial_rotary_factor": turned / size}
    given = Fields(factor | dict(fields.values), fields.where)
    return llama_config(
        fields,
        ropes=(rope(given, size, rope_fields(fields), theta=5_000_000.0),),
        has_experts=lambda layer: True,
        qk_norm="projection",
        **expert_counts(fields, "num_local_experts", "num_experts"),
        expert_size=fields.integer("intermediate_size"),
        expert_scores="sigmoid",
        expert_choice_bias=True,
    )


MINIMAX_M2_NAMES = LLAMA_NAMES | {"choice_bias": "e_score_correction_bias"}
MINIMAX_M2_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    minimax_m2_config,
    MINIMAX_M2_NAMES | {"mlp": "block_sparse_moe", "gate": "w1", "down": "w2", "up": "w3"},
    defaults=MINIMAX_M2_DEFAULTS,
    in_memory=MINIMAX_M2_NAMES,
)
