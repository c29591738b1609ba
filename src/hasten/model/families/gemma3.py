"""Gemma 3, text (arXiv 2503.19786): Gemma 2 with QK-norm, five local layers to a global one, and two rotary tables."""

from hasten.errors import CheckpointError
from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, layer_count, rope
from hasten.model.families.gemma2 import gemma_config, gemma_layers, places


def config(fields: Fields) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise CheckpointError(f"{fields.where}: use_bidirectional_attention is not supported; hasten runs decoders")
    count = layer_count(fields)
    every = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    head_dim = fields.integer("head_dim", default=256, high=1 << 12)
    given = fields.section("rope_parameters")
    if given is not None:
        local_rope = rope(fields, head_dim, given.section("sliding_attention"), theta=10_000.0)
        global_rope = rope(fields, head_dim, given.section("full_attention"), theta=1_000_000.0)
    else:
        theta = fields.number("rope_local_base_freq", default=10_000.0, low=1.0)
        local_rope = rope(Fields({}, fields.where), head_dim, None, theta=theta)
        global_rope = rope(fields, head_dim, None, theta=1_000_000.0)
    return gemma_config(
        fields,
        head_dim=head_dim,
        qk_norm=True,
        ropes=(local_rope, global_rope),
        layers=gemma_layers(fields, default, {"sliding_attention": 0, "full_attention": 1}),
    )


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", config, places)
