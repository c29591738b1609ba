"""Gemma (arXiv 2403.08295): Llama with a scaled embedding, norm weights stored minus one, and a gated GELU.

Gemma 2 (arXiv 2408.00118): norms around both halves, alternating windows, soft-capped scores and logits.

Gemma 3, text (arXiv 2503.19786): Gemma 2 with QK-norm, five local layers to a global one, and two rotary tables.
"""

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
    ropes_of_kinds,
    window_of,
)

NAMES = LLAMA_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _of_all(fields: Fields) -> dict[str, Any]:
    """What the configs of all Gemmas share."""
    if fields.flag("use_bidirectional_attention", False):
        raise CheckpointError(f"{fields.where}: use_bidirectional_attention is not supported; hasten runs decoders")
    bias = fields.flag("attention_bias", False)
    return {
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "output_bias": bias,
        "embedding_scale": float(fields.integer("hidden_size")) ** 0.5,
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }


def gemma1_config(fields: Fields) -> ModelConfig:
    # Early files say "gelu" and mean its approximation by tanh, as transformers reads them.
    activation = fields.choice("hidden_act", options=ACTIVATION_NAMES | {"gelu": "gelu_tanh"})
    return llama_config(fields, activation=activation, **_of_all(fields))


GEMMA_DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}
GEMMA = Family("gemma", "GemmaForCausalLM", gemma1_config, defaults=GEMMA_DEFAULTS)


def gemma_config(fields: Fields, kinds: list[str], *, full_rope: int = 0, **changes: Any) -> ModelConfig:
    """The config that Gemma 2 and 3 share; kinds and full_rope as in `layers_of_kinds`."""
    # The scores are scaled by `query_pre_attn_scalar`, not by the head size.
    scale = fields.number("query_pre_attn_scalar", low=1e-6) ** -0.5
    values: dict[str, Any] = {
        "layers": layers_of_kinds(fields, kinds, window=window_of(fields), scale=scale, full_rope=full_rope),
        "activation": fields.choice("hidden_activation", options=ACTIVATION_NAMES),
        "post_norms": True,
        "attention_softcap": fields.number("attn_logit_softcapping", default=None, low=1e-6),
        "logit_softcap": fields.number("final_logit_softcapping", default=None, low=1e-6),
    }
    return llama_config(fields, **(_of_all(fields) | values | changes))


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
    local = fields.number("rope_local_base_freq", default=10_000.0, low=1.0)
    return gemma_config(
        fields,
        kinds,
        full_rope=1,
        qk_norm="head",
        ropes=ropes_of_kinds(fields, fields.integer("head_dim", high=1 << 12), theta=1_000_000.0, local_theta=local),
    )


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
