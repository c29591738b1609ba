"""LFM2 (arXiv 2511.23404): layers with a short convolution, some with attention; and its mixture of experts.

Queries and keys are normalised by head. The convolution's three products of its input are stored in one matrix. The
mixture has dense layers first, then experts chosen by sigmoid scores and a bias.
"""

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
from hasten.model.families.slices import RowSlice
from hasten.model.mixer_config import ConvolutionConfig


def lfm2_common(fields: Fields, kinds: list[str] | None, **changes: Any) -> ModelConfig:
    """What both have in common. kinds: those of the layers, where `layer_types` is absent."""
    fields.only(use_pos_enc=True)
    common = sizes(fields)
    layers = hybrid_layers(fields, kinds, LayerConfig(scale=common["head_dim"] ** -0.5), state=("conv",))
    mixer = ConvolutionConfig(
        kernel=fields.integer("conv_L_cache", low=2, high=1 << 8),
        width=common["hidden_size"],
        biased=fields.flag("conv_bias", False),
    )
    return llama_config(
        fields,
        theta=1_000_000.0,
        layers=layers,
        mixer=mixer if any(layer.keeps_state for layer in layers) else None,
        norm_eps=fields.number("norm_eps", high=1.0),
        activation="silu",
        qk_norm="head",
        **changes,
    )


def lfm2_fields(fields: Fields) -> Fields:
    """The same with fields of older files under their names of today."""
    values = dict(fields.values)
    for old, new in (("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")):
        if (found := values.pop(old, None)) is not None:
            values[new] = found
    return Fields(values, fields.where, fields.defaults)


def lfm2_inner(fields: Fields) -> int:
    """Inner features of the MLPs: two thirds of `intermediate_size`, scaled and rounded up, if so adjusted."""
    inner: int = fields.integer("intermediate_size", high=1 << 22)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    factor = fields.number("block_ffn_dim_multiplier", low=1e-3, high=1e3)
    multiple = fields.integer("block_multiple_of", high=1 << 16)
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def lfm2_config(fields: Fields) -> ModelConfig:
    fields = lfm2_fields(fields)
    fields.only(block_use_swiglu=True)
    count, attending = layer_count(fields), fields.value("full_attn_idxs")
    if attending is not None and not (isinstance(attending, list) and all(type(one) is int for one in attending)):
        raise fields.fail("full_attn_idxs", "a list of layer numbers", attending)
    kinds = ["full_attention" if attending is None or i in attending else "conv" for i in range(count)]
    return lfm2_common(fields, kinds, intermediate_size=lfm2_inner(fields))


def lfm2_moe_config(fields: Fields) -> ModelConfig:
    fields = lfm2_fields(fields)
    dense = fields.integer("num_dense_layers", low=0)
    return lfm2_common(
        fields,
        None,
        has_experts=lambda layer: layer >= dense,
        **expert_counts(fields, "num_experts"),
        expert_size=fields.integer("moe_intermediate_size"),
        expert_scores="sigmoid",
        expert_choice_bias=fields.flag("use_expert_bias", True),
        normalize_experts=fields.flag("norm_topk_prob", True),
        expert_sum_floor=1e-6,  # transformers adds it to the sum: a relative change of 1e-6 over the sum
        expert_weight_scale=fields.number("routed_scaling_factor"),
    )


def lfm2_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of the three products of the convolution's input."""
    size = config.hidden_size
    return {name: RowSlice(i * size, (i + 1) * size) for i, name in enumerate(("key", "query", "value"))}


LFM2_NAMES = LLAMA_NAMES | {
    "norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "output": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mixer": "conv",
    "key": "in_proj",
    "query": "in_proj",
    "value": "in_proj",
    "out": "out_proj",
    "mlp": "feed_forward",
    "gate": "w1",
    "up": "w3",
    "down": "w2",
    "choice_bias": "expert_bias",
}
LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}
LFM2 = Family("lfm2", "Lfm2ForCausalLM", lfm2_config, LFM2_NAMES, lfm2_rows, defaults=LFM2_DEFAULTS)
LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    lfm2_moe_config,
    LFM2_NAMES,
    lfm2_rows,
    defaults=LFM2_DEFAULTS
    | {"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
    | {"routed_scaling_factor": 1.0},
)
