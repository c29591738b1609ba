"""Families whose blocks normalise what attention and MLP return, and not what they read.

OLMo 2 (arXiv 2501.00656): one norm over all heads of the queries, one over those of the keys. OLMo 3: windows in three
of four layers, whose rotary table is not stretched. EXAONE 4 (arXiv 2507.11407): queries and keys normalised by head;
beside windowed layers, those with full attention have no rotary positions. OLMoE (arXiv 2409.02060) normalises what
they read, and the queries and keys of all heads; its MLPs are experts.
"""

from dataclasses import replace
from typing import Any

from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
    Family,
    expert_counts,
    layer_count,
    layers_of_kinds,
    llama_config,
    ropes_of_kinds,
    sizes,
    window_of,
)

NAMES = LLAMA_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
NORMS: dict[str, Any] = {"pre_norms": False, "post_norms": True}


def olmo2_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return llama_config(fields, qk_norm="projection", qkv_bias=bias, output_bias=bias, **NORMS)


OLMO2_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", olmo2_config, NAMES, defaults=OLMO2_DEFAULTS)


def olmo3_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layer_count(fields))]
    size, theta = sizes(fields)["head_dim"], 500_000.0
    return llama_config(
        fields,
        layers=layers_of_kinds(fields, kinds, window=window_of(fields), full_rope=1),
        ropes=ropes_of_kinds(fields, size, theta=theta, local_theta=theta),
        qk_norm="projection",
        qkv_bias=bias,
        output_bias=bias,
        **NORMS,
    )


OLMO3_DEFAULTS = OLMO2_DEFAULTS | {"sliding_window": 4096}
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", olmo3_config, NAMES, defaults=OLMO3_DEFAULTS)


def exaone4_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    count, window = layer_count(fields), window_of(fields)
    if window is None:
        return layers_of_kinds(fields, ["full_attention"] * count, window=None)
    layers = layers_of_kinds(fields, fields.layer_kinds(count) or _kinds_of_pattern(fields, count), window=window)
    return tuple(layer if layer.window is not None else replace(layer, rope=None) for layer in layers)


def _kinds_of_pattern(fields: Fields, count: int) -> list[str]:
    """The kinds of layers by `sliding_window_pattern`: "LLLG", or 4 for three local ones to a global one."""
    every = fields.value("sliding_window_pattern")
    every = len(every) if isinstance(every, str) and every == "L" * (len(every) - 1) + "G" else every
    if type(every) is not int or every < 1:
        wanted = 'a positive integer, or local layers and then a global one ("LLLG")'
        raise fields.fail("sliding_window_pattern", wanted, every)
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def exaone4_config(fields: Fields) -> ModelConfig:
    return llama_config(fields, layers=exaone4_layers(fields), qk_norm="head", **NORMS)


EXAONE4_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", exaone4_config, NAMES, defaults=EXAONE4_DEFAULTS)


def olmoe_config(fields: Fields) -> ModelConfig:
    fields.only(clip_qkv=None, sliding_window=None)
    bias = fields.flag("attention_bias", False)
    return llama_config(
        fields,
        has_experts=lambda layer: True,
        qk_norm="projection",
        qkv_bias=bias,
        output_bias=bias,
        **expert_counts(fields, "num_experts", "num_local_experts"),
        expert_size=fields.integer("intermediate_size"),
        normalize_experts=fields.flag("norm_topk_prob", False),
    )


OLMOE_DEFAULTS = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
OLMOE = Family("olmoe", "OlmoeForCausalLM", olmoe_config, defaults=OLMOE_DEFAULTS)
