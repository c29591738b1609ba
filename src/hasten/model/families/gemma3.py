"""Gemma 3, text (arXiv 2503.19786): Gemma 2 with QK-norm, five local layers to a global one, and two rotary tables."""

from hasten.model.config import Fields, ModelConfig, RopeConfig
from hasten.model.families.family import Family, layer_count, rope
from hasten.model.families.gemma2 import NAMES, gemma_config


def config(fields: Fields) -> ModelConfig:
    count = layer_count(fields)
    every = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return gemma_config(fields, kinds, full_rope=1, qk_norm=True, ropes=_ropes(fields))


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The table of the local layers and that of the global ones.

    Transformers 5 nests both in `rope_parameters`; before, `rope_theta` and `rope_scaling` spoke of the global layers
    and `rope_local_base_freq` of the local ones. The older fields fill what the newer ones leave open.
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
DEFAULTS = {
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
FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", config, NAMES, defaults=DEFAULTS)
