"""Families most of whose layers are Gated DeltaNet (arXiv 2412.06464), every fourth one attention with an output gate.

Qwen3-Next: experts with a gated MLP for every token beside them; its projections are stored together, grouped by key
head. Qwen 3.5, 3.6 and 3.8: the same with an MLP, or with experts, and projections stored apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
    Family,
    expert_counts,
    hybrid_layers,
    layer_count,
    llama_config,
    sizes,
)
from hasten.model.families.qwen import sparse_layers
from hasten.model.families.slices import RowSlice
from hasten.model.mixer_config import DeltaConfig


def delta_sizes(fields: Fields) -> DeltaConfig:
    """The sizes of Gated DeltaNet."""
    key_heads = fields.integer("linear_num_key_heads", high=1 << 12)
    value_heads = fields.integer("linear_num_value_heads", high=1 << 12)
    if value_heads % key_heads:
        raise fields.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})", value_heads)
    return DeltaConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", high=1 << 12),
        value_dim=fields.integer("linear_value_head_dim", high=1 << 12),
        kernel=fields.integer("linear_conv_kernel_dim", high=1 << 8),
    )


def delta_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Layers with Gated DeltaNet, but for every `full_attention_interval`-th, which has attention."""
    count, scale = layer_count(fields), sizes(fields)["head_dim"] ** -0.5
    every = fields.integer("full_attention_interval", default=4)
    by_interval = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return hybrid_layers(fields, by_interval, LayerConfig(scale=scale), state=("linear_attention",))


def delta_config(fields: Fields, **changes: Any) -> ModelConfig:
    """What these families have in common."""
    fields.only(hidden_act="silu", attn_output_gate=True)
    bias = fields.flag("attention_bias", False)
    return llama_config(
        fields,
        layers=delta_layers(fields),
        mixer=delta_sizes(fields),
        norm_offset=1.0,
        qk_norm="head",
        attention_gate=True,
        qkv_bias=bias,
        output_bias=bias,
        **changes,
    )


def delta_experts(fields: Fields) -> dict[str, Any]:
    """Experts, and beside them an MLP with a gate."""
    return {
        **expert_counts(fields, "num_experts"),
        "expert_size": fields.integer("moe_intermediate_size"),
        "shared_size": fields.integer("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def qwen3_next_config(fields: Fields) -> ModelConfig:
    normalized = fields.flag("norm_topk_prob", False)
    experts = delta_experts(fields) | {"normalize_experts": normalized}
    return delta_config(fields, has_experts=sparse_layers(fields), **experts)


def qwen3_next_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of the projections: q, k, v and z of each key head together, as are b and a."""
    sizes = config.state_mixer
    assert isinstance(sizes, DeltaConfig)
    groups, shared = sizes.key_heads, sizes.value_heads // sizes.key_heads
    key, value = sizes.key_dim, shared * sizes.value_dim
    return {
        "query": RowSlice(0, key, groups),
        "key": RowSlice(key, 2 * key, groups),
        "value": RowSlice(2 * key, 2 * key + value, groups),
        "z": RowSlice(2 * key + value, 2 * key + 2 * value, groups),
        "beta": RowSlice(0, shared, groups),
        "decay": RowSlice(shared, 2 * shared, groups),
    }


def qwen3_5_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of the projection of queries, keys and values."""
    sizes = config.state_mixer
    assert isinstance(sizes, DeltaConfig)
    keys = sizes.keys
    return {
        "query": RowSlice(0, keys),
        "key": RowSlice(keys, 2 * keys),
        "value": RowSlice(2 * keys, 2 * keys + sizes.values),
    }


def qwen3_next_gguf_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of a GGUF file's projections: queries, keys and values as in Qwen 3.5, b and a as in the folder."""
    folder = qwen3_next_rows(config)
    return qwen3_5_rows(config) | {"beta": folder["beta"], "decay": folder["decay"]}


def qwen3_5_moe_config(fields: Fields) -> ModelConfig:
    # All layers have experts, and the config no size of an MLP without.
    inner = {"intermediate_size": fields.value("moe_intermediate_size")}
    given = Fields(inner | dict(fields.values), fields.where, fields.defaults)
    config = delta_config(given, has_experts=lambda layer: True, **delta_experts(fields))
    return replace(config, source=dict(fields.values))


DELTA_NAMES = LLAMA_NAMES | {
    "mixer": "linear_attn",
    "conv": "conv1d",
    "log_rate": "A_log",
    "rate_bias": "dt_bias",
    "value_norm": "norm",
    "out": "out_proj",
    "shared": "shared_expert",
    "shared_gate": "shared_expert_gate",
}
QWEN3_NEXT_NAMES = DELTA_NAMES | dict.fromkeys(("query", "key", "value", "z"), "in_proj_qkvz")
QWEN3_NEXT_NAMES |= dict.fromkeys(("beta", "decay"), "in_proj_ba")
QWEN3_5_NAMES = DELTA_NAMES | dict.fromkeys(("query", "key", "value"), "in_proj_qkv")
QWEN3_5_NAMES |= {"z": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a"}
MULTI_TOKEN_NAMES = {
    "blocks": "mtp.layers",
    "norm": "mtp.norm",
    "joined": "mtp.fc",
    "token_norm": "mtp.pre_fc_norm_embedding",
    "state_norm": "mtp.pre_fc_norm_hidden",
}

DELTA_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERT_DEFAULTS = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
NEXT_FOLDER = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    qwen3_next_config,
    QWEN3_NEXT_NAMES,
    qwen3_next_rows,
    defaults={
        **DELTA_DEFAULTS,
        **EXPERT_DEFAULTS,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    multi_token=MULTI_TOKEN_NAMES,
)
NEXT_GGUF_NAMES = QWEN3_NEXT_NAMES | {name: QWEN3_5_NAMES[name] for name in ("query", "key", "value", "z")}
QWEN3_NEXT = replace(NEXT_FOLDER, in_gguf=replace(NEXT_FOLDER, names=NEXT_GGUF_NAMES, rows=qwen3_next_gguf_rows))
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    delta_config,
    QWEN3_5_NAMES,
    qwen3_5_rows,
    defaults={**DELTA_DEFAULTS, "num_key_value_heads": 4},
    multi_token=MULTI_TOKEN_NAMES,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    qwen3_5_moe_config,
    QWEN3_5_NAMES,
    qwen3_5_rows,
    defaults={**DELTA_DEFAULTS, **EXPERT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
    multi_token=MULTI_TOKEN_NAMES,
)
