"""Gemma 2 (arXiv 2408.00118): norms around both halves, alternating windows, soft-capped scores and logits."""

from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import (
    ACTIVATION_NAMES,
    LLAMA_NAMES,
    Family,
    layer_count,
    layers_of_kinds,
    llama_config,
    window_of,
)

NAMES = LLAMA_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma_config(fields: Fields, kinds: list[str], *, full_rope: int = 0, **changes: Any) -> ModelConfig:
    """What Gemma 2 and 3 share; kinds and full_rope as in `layers_of_kinds`."""
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


def config(fields: Fields) -> ModelConfig:
    kinds = [("full_attention" if i % 2 else "sliding_attention") for i in range(layer_count(fields))]
    return gemma_config(fields, kinds)


DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
FAMILY = Family("gemma2", "Gemma2ForCausalLM", config, NAMES, defaults=DEFAULTS)
