"""Qwen 3 mixture of experts: Qwen 3 with most MLPs replaced by many small experts."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, expert_counts, llama_config, window_of


def config(fields: Fields) -> ModelConfig:
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    step = fields.integer("decoder_sparse_step", default=1, low=0)
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise fields.fail("mlp_only_layers", "a list of layer numbers", dense)
    return llama_config(
        fields,
        window=window,
        has_experts=lambda layer: layer not in dense and step > 0 and (layer + 1) % step == 0,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        **expert_counts(fields, "num_experts", "num_local_experts"),
        expert_size=fields.integer("moe_intermediate_size"),
        normalize_experts=fields.flag("norm_topk_prob", False),
    )


DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", config, defaults=DEFAULTS)
