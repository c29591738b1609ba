"""Qwen 2 and 2.5 (arXiv 2407.10671): Llama with biases on q, k and v, and a window in the later layers if enabled.

Qwen 3 (arXiv 2505.09388): Llama with an RMSNorm on each query and key head, and an explicit head size; and its mixture
of experts, with most MLPs replaced by many small ones. Qwen 1.5 and 2 had one too, with an MLP for every token beside
the experts.
"""

from collections.abc import Callable

from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
    Family,
    expert_counts,
    layer_count,
    layers_of_kinds,
    llama_config,
    window_of,
)


def windowed_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Layers from `max_window_layers` on have a window, if `use_sliding_window`; `layer_types` overrides that."""
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", low=0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layer_count(fields))]
    return layers_of_kinds(fields, kinds, window=window)


def qwen2_config(fields: Fields) -> ModelConfig:
    return llama_config(fields, qkv_bias=True, layers=windowed_layers(fields))


QWEN2_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qwen2_config, defaults=QWEN2_DEFAULTS)


def qwen3_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return llama_config(fields, qk_norm="head", qkv_bias=bias, output_bias=bias, layers=windowed_layers(fields))


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", qwen3_config, defaults=QWEN2_DEFAULTS | {"head_dim": 128})


def sparse_layers(fields: Fields) -> Callable[[int], bool]:
    """Whether a layer has experts: every `decoder_sparse_step`-th, but for those of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", default=1, low=0)
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise fields.fail("mlp_only_layers", "a list of layer numbers", dense)
    return lambda layer: layer not in dense and step > 0 and (layer + 1) % step == 0


def qwen2_moe_config(fields: Fields) -> ModelConfig:
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    last = fields.integer("max_window_layers", low=0)
    windowed = [window is not None and i % 2 == 0 and i < last for i in range(layer_count(fields))]
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed]
    return llama_config(
        fields,
        layers=layers_of_kinds(fields, kinds, window=window),
        has_experts=sparse_layers(fields),
        qkv_bias=fields.flag("qkv_bias", True),
        **expert_counts(fields, "num_experts"),
        expert_size=fields.integer("moe_intermediate_size"),
        normalize_experts=fields.flag("norm_topk_prob", False),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


QWEN2_MOE_NAMES = LLAMA_NAMES | {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}
QWEN2_MOE_DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe_config, QWEN2_MOE_NAMES, defaults=QWEN2_MOE_DEFAULTS)


def qwen3_moe_config(fields: Fields) -> ModelConfig:
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    return llama_config(
        fields,
        window=window,
        has_experts=sparse_layers(fields),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        **expert_counts(fields, "num_experts", "num_local_experts"),
        expert_size=fields.integer("moe_intermediate_size"),
        normalize_experts=fields.flag("norm_topk_prob", False),
    )


MOE_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe_config, defaults=MOE_DEFAULTS)
