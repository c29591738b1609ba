"""Cohere's Command R7B and Command A (arXiv 2504.00698): attention and MLP side by side in each block.

One LayerNorm without bias for both, neighbouring elements of a head rotated together, scaled logits; windows in three
of four layers, and no rotary positions in the others.
"""

from dataclasses import replace

from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import Family, layer_count, layers_of_kinds, llama_config, window_of


def cohere2_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    every = fields.integer("sliding_window_pattern", default=4)
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layer_count(fields))]
    layers = layers_of_kinds(fields, kinds, window=window_of(fields))
    return tuple(layer if layer.window is not None else replace(layer, rope=None) for layer in layers)


def cohere2_config(fields: Fields) -> ModelConfig:
    fields.only(use_parallel_block=True, use_gated_activation=True, use_qk_norm=False, rotary_pct=1.0)
    bias = fields.flag("attention_bias", False)
    return llama_config(
        fields,
        layers=cohere2_layers(fields),
        norm="layernorm",
        norm_bias=False,
        norm_eps=fields.number("layer_norm_eps", default=1e-5, high=1.0),
        parallel=True,
        rope_pairs=True,
        qkv_bias=bias,
        output_bias=bias,
        logit_scale=fields.number("logit_scale"),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "sliding_window": 4096}
COHERE2 = Family("cohere2", "Cohere2ForCausalLM", cohere2_config, defaults=DEFAULTS)
