"""GPT-2 and GPT-BigCode: learned positions, LayerNorm, biases everywhere."""

from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import ACTIVATION_NAMES, Family, common_fields, layer_count, qkv_rows
from hasten.model.families.slices import RowSlice


def gpt_config(fields: Fields, **changes: Any) -> ModelConfig:
    """The config that GPT-2 and GPT-BigCode share."""
    hidden = fields.integer("n_embd", "hidden_size")
    heads = fields.integer("n_head", "num_attention_heads", high=1 << 12)
    if hidden % heads:
        raise CheckpointError(f"{fields.where}: n_embd ({hidden}) must be a multiple of n_head ({heads})")
    scale = (hidden // heads) ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("n_inner", default=4 * hidden, high=1 << 22),
        "layers": tuple(
            LayerConfig(rope=None, scale=scale / (i + 1) if by_layer else scale)
            for i in range(layer_count(fields, "n_layer", "num_hidden_layers"))
        ),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": fields.integer("n_positions", "max_position_embeddings", high=1 << 24),
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_epsilon", default=1e-5, high=1.0),
        "activation": fields.choice("activation_function", options=ACTIVATION_NAMES),
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "learned_positions": True,
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }
    return ModelConfig(**(common_fields(fields) | values | changes))


GPT_NAMES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention": "attn",
    **dict.fromkeys("qkv", "c_attn"),
    "output": "c_proj",
    "up": "c_fc",
    "down": "c_proj",
}


DEFAULTS = {"n_positions": 1024, "activation_function": "gelu_new"}
# Weights are stored transposed, (in, out).
GPT2 = Family("gpt2", "GPT2LMHeadModel", gpt_config, GPT_NAMES, qkv_rows, transposed=True, defaults=DEFAULTS)


def bigcode_config(fields: Fields) -> ModelConfig:
    """StarCoder (arXiv 2305.06161): GPT-2 with one key/value head for all query heads (multi-query)."""
    heads = fields.integer("n_head", "num_attention_heads", high=1 << 12)
    return gpt_config(fields, kv_heads=1 if fields.flag("multi_query", True) else heads)


def bigcode_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Rows of q, k and v in the fused matrix; without multi-query attention they are interleaved head by head."""
    return qkv_rows(config, groups=config.heads if config.kv_heads > 1 else 1)


BIGCODE = {"n_positions": 1024, "activation_function": "gelu_pytorch_tanh"}
GPT_BIGCODE = Family("gpt_bigcode", "GPTBigCodeForCausalLM", bigcode_config, GPT_NAMES, bigcode_rows, defaults=BIGCODE)
