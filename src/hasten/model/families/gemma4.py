"""Gemma 4, text: Gemma 3 with heads of two sizes, and parts that not all of its models have.

Small models have per-layer embeddings (`token_features`), and last layers that use the keys and values of earlier ones.
In large ones the values of global layers are their keys. The 26B-A4B has experts beside the MLP of each layer.
"""

from dataclasses import replace
from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, LayerConfig, ModelConfig, RopeConfig
from hasten.model.families.family import (
    ACTIVATION_NAMES,
    ROPE_KINDS,
    Family,
    expert_counts,
    layer_count,
    llama_config,
    rope,
    sizes,
)
from hasten.model.families.gemma import NAMES
from hasten.model.families.slices import Stacks

LOCAL, GLOBAL = "sliding_attention", "full_attention"
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
OWN_SIZES = ("head_dim", "num_key_value_heads")  # fields that layers may have of their own


def gemma4_config(fields: Fields) -> ModelConfig:
    if fields.value("use_bidirectional_attention") not in (None, "vision"):  # "vision": of the tokens of an image
        found = fields.value("use_bidirectional_attention")
        raise fields.fail("use_bidirectional_attention", "'vision' or absent; hasten runs decoders", found)
    common, bias = sizes(fields), fields.flag("attention_bias", False)
    features = fields.integer("hidden_size_per_layer_input", default=0, low=0)
    rows = fields.integer("vocab_size_per_layer_input", low=common["vocab_size"], high=1 << 24) if features else 0
    layers = gemma4_layers(fields, common)
    experts = gemma4_experts(fields, layers) if fields.flag("enable_moe_block", False) else {}
    return llama_config(
        fields,
        **experts,
        layers=layers,
        ropes=gemma4_ropes(fields, common["head_dim"], layers),
        activation=fields.choice("hidden_activation", options=ACTIVATION_NAMES),
        post_norms=True,
        qk_norm="head",
        value_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=common["hidden_size"] ** 0.5,
        logit_softcap=fields.number("final_logit_softcapping", default=None, low=1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        token_features=features,
        token_vocab_size=rows,
        block_scales=True,
    )


def gemma4_layers(fields: Fields, common: dict[str, Any]) -> tuple[LayerConfig, ...]:
    """The layers: which has which heads, and whose keys and values."""
    count = layer_count(fields)
    kinds = fields.layer_kinds(count) or [LOCAL if (i + 1) % 6 else GLOBAL for i in range(count)]
    kinds = [*kinds[:-1], GLOBAL]  # the last one is, whatever a file says
    window, merged = fields.integer("sliding_window", high=1 << 30), fields.flag("attention_k_eq_v", False)
    local = LayerConfig(window=window, scale=1.0)
    whole = LayerConfig(rope=1, scale=1.0, values_of_keys=merged)
    own = own_sizes(fields, kinds, merged=merged)
    layers = [
        replace(local if kind == LOCAL else whole, head_dim=size, kv_heads=heads)
        for kind, (size, heads) in zip(kinds, own, strict=True)
    ]
    for i, layer in enumerate(layers):
        kv_heads = common["kv_heads"] if layer.kv_heads is None else layer.kv_heads
        if common["heads"] % kv_heads:
            raise CheckpointError(
                f"{fields.where}: num_attention_heads ({common['heads']}) must be a multiple of the {kv_heads} key and "
                f"value heads of layer {i}"
            )
    shared = fields.integer("num_kv_shared_layers", default=0, low=0, high=count - 1)
    wide = fields.flag("use_double_wide_mlp", False)
    for i in range(count - shared, count):
        before = [place for place in range(count - shared) if kinds[place] == kinds[i]]
        if not before:
            raise fields.fail("num_kv_shared_layers", f"such that a {kinds[i]} layer comes before those", shared)
        if (layers[before[-1]].head_dim, layers[before[-1]].kv_heads) != (layers[i].head_dim, layers[i].kv_heads):
            raise CheckpointError(f"{fields.where}: layer {i} uses the keys of layer {before[-1]}, whose heads differ")
        layers[before[-1]] = replace(layers[before[-1]], lends_keys=True)
        inner = 2 * common["intermediate_size"] if wide else None
        layers[i] = replace(layers[i], keys_of=before[-1], values_of_keys=False, inner=inner)
    return tuple(layers)


def own_sizes(fields: Fields, kinds: list[str], *, merged: bool) -> list[tuple[int | None, int | None]]:
    """head_dim and kv_heads of each layer, where they are not the model's.

    Transformers writes them into `per_layer_config`, by layer; published files have the fields of global layers.
    """
    by_layer = fields.section("per_layer_config")
    if by_layer is None:
        heads = fields.integer("num_global_key_value_heads", default=None, high=1 << 12) if merged else None
        size = fields.integer("global_head_dim", high=1 << 12)
        found = [(size, heads) if kind == GLOBAL else (None, None) for kind in kinds]
    else:
        found = [(None, None) for _ in kinds]
        for name in by_layer.values:
            if not (name.isdecimal() and len(name) < 8 and int(name) < len(kinds)):
                raise fields.fail("per_layer_config", f"an object of layers from 0 to {len(kinds) - 1}", name)
            own = by_layer.section(name) or Fields({}, by_layer.where)
            if unknown := sorted(set(own.values) - set(OWN_SIZES)):
                known = " and ".join(OWN_SIZES)
                raise own.fail(unknown[0], f"absent: only {known} may differ by layer", own.value(unknown[0]))
            size, heads = (own.integer(one, default=None, high=1 << 12) for one in OWN_SIZES)
            found[int(name)] = size, heads
    plain = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    return [(None if size == plain[0] else size, None if heads == plain[1] else heads) for size, heads in found]


def gemma4_ropes(fields: Fields, head_dim: int, layers: tuple[LayerConfig, ...]) -> tuple[RopeConfig, RopeConfig]:
    """The rotary tables of local and of global layers."""
    given, found = fields.section("rope_parameters"), []
    plain = Fields({"max_position_embeddings": fields.integer("max_position_embeddings", high=1 << 30)}, fields.where)
    for place, kind in enumerate(ROPES):
        own = {head_dim if layer.head_dim is None else layer.head_dim for layer in layers if layer.rope == place}
        size = next(iter(own), head_dim)
        if len(own) > 1:
            raise CheckpointError(f"{fields.where}: the heads of its {kind} layers have several sizes: {sorted(own)}")
        section = (given.section(kind) if given else None) or Fields(ROPES[kind], fields.where)
        if section.value("rope_type") in (None, "default"):  # turns whole heads
            values = {name: value for name, value in section.values.items() if name != "partial_rotary_factor"}
            section = Fields(values, section.where)
        kinds = ROPE_KINDS | {"proportional": "proportional"}
        found.append(rope(plain, size, section, theta=10_000.0, kinds=kinds))
    return found[0], found[1]


def gemma4_experts(fields: Fields, layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """Experts in every layer, beside its MLP."""
    if any(layer.inner is not None for layer in layers):
        raise fields.fail("use_double_wide_mlp", "false beside experts (enable_moe_block)", True)
    return expert_counts(fields, "num_experts", chosen_names=("top_k_experts",)) | {
        "has_experts": lambda layer: True,
        "expert_size": fields.integer("moe_intermediate_size"),
        "shared_size": fields.integer("intermediate_size", high=1 << 22),
        "expert_norms": True,
    }


def unused_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Keys and values of layers that use those of others, which published files hold all the same."""
    borrowing = [i for i, layer in enumerate(config.layers) if layer.keys_of is not None]
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"{base}layers.{i}.self_attn.{part}." for base in ("model.", "") for i in borrowing for part in parts)


GEMMA4_NAMES = NAMES | {
    "token_features.embedding": "embed_tokens_per_layer",
    "token_features.projection": "per_layer_model_projection",
    "token_features.norm": "per_layer_projection_norm",
    "token_gate.reduce": "per_layer_input_gate",
    "token_gate.expand": "per_layer_projection",
    "token_gate.norm": "post_per_layer_input_norm",
    "scale": "layer_scalar",
    "mlp.router": "router.proj",
    "mlp.router_scale": "router.scale",
    "mlp.expert_scale": "router.per_expert_scale",
    "mlp.experts": "experts",
    "mlp.shared": "mlp",
    "mlp.shared_post_norm": "post_feedforward_layernorm_1",
    "mlp.expert_norm": "pre_feedforward_layernorm_2",
    "mlp.expert_post_norm": "post_feedforward_layernorm_2",
}
GEMMA4_NAMES |= {part: f"model.{GEMMA4_NAMES[part]}" for part in GEMMA4_NAMES if part.startswith("token_features.")}
# Published text configs inside a multimodal one may leave out even sizes that equal these.
GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    gemma4_config,
    GEMMA4_NAMES,
    defaults=GEMMA4_DEFAULTS,
    stacks=Stacks("experts.gate_up_proj", "experts.down_proj"),
    unused=unused_tensors,
)
