"""Gemma 2 (arXiv 2408.00118): norms around both halves, alternating windows, soft-capped scores and logits.

Gemma 3, text (arXiv 2503.19786): Gemma 2 with QK-norm, five local layers to a global one, and two rotary tables.
"""

from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, ModelConfig, RopeConfig
from hasten.model.families.family import (
    ACTIVATION_NAMES,
    LLAMA_NAMES,
    Family,
    layer_count,
    layers_of_kinds,
    llama_config,
    rope,
    window_of,
)

NAMES = LLAMA_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma_config(fields: Fields, kinds: list[str], *, full_rope: int = 0, **changes: Any) -> ModelConfig:
    """The config that Gemma 2 and 3 share; kinds and full_rope as in `layers_of_kinds`."""
    if fields.flag("use_bidirectional_attention", False):
        raise CheckpointError(f"{fields.where}: use_bidirectional_attention is not supported; hasten runs decoders")
    bias = fields.flag("attention_bias", False)
    # The scores are scaled by `query_pre_attn_scalar`, not by the head size.
    scale = fields.number("query_pre_attn_scalar", low=1e-6) ** -0.5
    values: dict[str, Any] = {
        "layers": layers_of_kinds(fields, kinds, window=window_of(fields), scale=scale, full_rope=full_rope),
        "activation": fields.choice("hidden_activation", options=ACTIVATION_NAMES),
        "norm_offset": 1.0,
        "post_norms": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "embedding_scale": float(fields.integer("hidden_size")) ** 0.5,
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "attention_softcap": fields.number("attn_logit_softcapping", default=None, low=1e-6),
        "logit_softcap": fields.number("final_logit_softcapping", default=None, low=1e-6),
    }
    return llama_config(fields, **(values | changes))


def gemma2_config(fields: Fields) -> ModelConfig:
    kinds = [("full_attention" if i % 2 else "sliding_attention") for i in range(layer_count(fields))]
    return gemma_config(fields, kinds)


GEMMA2_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", gemma2_config, NAMES, defaults=GEMMA2_DEFAULTS)


def gemma3_config(fields: Fields) -> ModelConfig:
    count = layer_count(fields)
    every = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return gemma_config(fields, kinds, full_rope=1, qk_norm=True, ropes=_ropes(fields))


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The rotary tables of local and of global layers.

    Transformers 5 nests both in `rope_parameters`; before, `rope_theta` and `rope_scaling` were for global layers and
    `rope_local_base_freq` for local ones. The older fields are the defaults of the newer ones.
    """
    head_dim = fields.integer("head_dim", high=1 << 12)
    given = fields.section("rope_parameters")
    tables = {kind: given.section(kind) if given else None for kind in ("sliding_attention", "full_attention")}
    local, whole = tables["sliding_attention"], tables["full_attention"]
    scaling = fields.section("rope_scaling")
    if scaling is not None:
        whole = Fields({**(whole.values if whole else {}), **scaling.values}, scaling.where)
    theta = fields.number("rope_local_base_freq", default=10_000.0, low=1.0)
    plain = Fields({"max_position_embeddings": fields.integer("max_position_embeddings", high=1 << 30)}, fields.where)
    return (rope(plain, head_dim, local, theta=theta), rope(fields, head_dim, whole, theta=1_000_000.0))


# Published text configs inside a multimodal one leave out even sizes that equal these.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", gemma3_config, NAMES, defaults=GEMMA3_DEFAULTS)
