"""Granite 4 H: Mamba-2 (arXiv 2405.21060), in some layers attention, with Granite's four scalars.

Attention has no rotary positions in the published models. A layer has experts beside an MLP for every token, or that
MLP alone.
"""

import math
from dataclasses import replace
from typing import Any

from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import LLAMA_NAMES, Family, expert_counts, hybrid_layers, llama_config
from hasten.model.families.slices import RowSlice, Stacks
from hasten.model.families.variants import granite_scales
from hasten.model.mixer_config import MambaConfig

NO_LIMIT = 1e10  # of Mamba-2's steps, which files write as Infinity or as a number that none reaches


def check_step_limit(fields: Fields) -> None:
    """Raise CheckpointError where Mamba-2's steps are limited, by less than any step reaches."""
    limit = fields.value("time_step_limit")
    low, high = limit if isinstance(limit, list | tuple) and len(limit) == 2 else (math.nan, math.nan)
    if high == {"__float__": "Infinity"}:  # as transformers 5 writes it
        high = math.inf
    unlimited = type(low) in (int, float) and low == 0 and type(high) in (int, float) and high >= NO_LIMIT
    if limit is not None and not unlimited:
        raise fields.fail("time_step_limit", f"[0.0, Infinity] ({NO_LIMIT:g} or more) or absent", limit)


def mamba_heads(fields: Fields, name: str, groups_name: str) -> tuple[int, int]:
    """The numbers of heads and of groups of keys and queries, in these fields."""
    heads, groups = (fields.integer(one, high=1 << 12) for one in (name, groups_name))
    if heads % groups:
        raise fields.fail(groups_name, f"a divisor of {name} ({heads})", groups)
    return heads, groups


def mamba_sizes(fields: Fields) -> MambaConfig:
    """The sizes of Mamba-2, as Granite and Bamba name them."""
    check_step_limit(fields)
    heads, groups = mamba_heads(fields, "mamba_n_heads", "mamba_n_groups")
    wide = fields.integer("mamba_expand", high=1 << 8) * fields.integer("hidden_size")
    if wide % heads:
        raise fields.fail("mamba_n_heads", f"a divisor of the {wide} features of mamba_expand · hidden_size", heads)
    if fields.value("mamba_d_head") != "auto":
        size = fields.integer("mamba_d_head")
        if size * heads != wide:
            raise fields.fail("mamba_d_head", f"{wide // heads}, for {heads} heads of {wide} features", size)
    return MambaConfig(
        kernel=fields.integer("mamba_d_conv", low=2, high=1 << 8),
        heads=heads,
        head_dim=wide // heads,
        groups=groups,
        state_dim=fields.integer("mamba_d_state", high=1 << 12),
        biased=fields.flag("mamba_proj_bias", False),
        conv_biased=fields.flag("mamba_conv_bias", True),
    )


def granite_hybrid_config(fields: Fields) -> ModelConfig:
    fields.only(hidden_act="silu")
    turned = fields.value("position_embedding_type") not in (None, "nope")
    if turned:
        fields.only(position_embedding_type="rope")
    scale = fields.number("attention_multiplier", default=1.0, low=1e-6)
    full = LayerConfig(scale=scale, rope=0 if turned else None)
    layers = hybrid_layers(fields, None, full, state=("linear_attention", "mamba"))
    bias = fields.flag("attention_bias", False)
    shared = fields.integer("shared_intermediate_size", high=1 << 22)
    changes: dict[str, Any] = {} if turned else {"ropes": ()}
    if fields.integer("num_local_experts", low=0, high=1 << 12):
        changes |= expert_counts(fields, "num_local_experts") | {"has_experts": lambda layer: True}
        changes |= {"expert_size": fields.integer("intermediate_size"), "shared_size": shared}
    else:
        changes["intermediate_size"] = shared
    return llama_config(
        fields,
        layers=layers,
        mixer=mamba_sizes(fields) if any(layer.keeps_state for layer in layers) else None,
        qkv_bias=bias,
        output_bias=bias,
        **granite_scales(fields),
        **changes,
    )


def mamba_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of the products of Mamba-2's input."""
    found, start = {}, 0
    for name, features in ({} if config.mixer is None else config.mixer.inputs).items():
        found[name] = RowSlice(start, start := start + features)
    return found


def granite_hybrid_rows(config: ModelConfig) -> dict[str, RowSlice]:
    """Row slices of the products of Mamba-2's input, and of gate and up of the MLP for every token."""
    size = config.shared_size or config.intermediate_size
    return mamba_rows(config) | {"gate": RowSlice(0, size), "up": RowSlice(size, 2 * size)}


MAMBA_NAMES = {
    "conv": "conv1d",
    "log_rate": "A_log",
    "step_bias": "dt_bias",
    "skip": "D",
    "value_norm": "norm",
    "out": "out_proj",
    **dict.fromkeys(("z", "value", "key", "query", "step"), "in_proj"),
}
GRANITE_HYBRID_NAMES = (
    LLAMA_NAMES
    | MAMBA_NAMES
    | {"mixer": "mamba", "mlp": "block_sparse_moe", "mlp.router": "block_sparse_moe.router.layer"}
)
for part in ("mlp", "mlp.shared"):  # the MLP for every token, alone or beside experts
    GRANITE_HYBRID_NAMES |= dict.fromkeys((f"{part}.gate", f"{part}.up"), "shared_mlp.input_linear")
    GRANITE_HYBRID_NAMES |= {f"{part}.down": "shared_mlp.output_linear"}
HYBRID_FOLDER = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    granite_hybrid_config,
    GRANITE_HYBRID_NAMES,
    granite_hybrid_rows,
    defaults={
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    stacks=Stacks("input_linear.weight", "output_linear.weight"),
    in_memory=GRANITE_HYBRID_NAMES | {"mlp.router": "block_sparse_moe.router"},
)
GGUF_NAMES = GRANITE_HYBRID_NAMES | {
    f"{part}.{name}": f"shared_mlp.{name}_linear" for part in ("mlp", "mlp.shared") for name in ("gate", "up")
}
GRANITE_HYBRID = replace(
    HYBRID_FOLDER, in_gguf=replace(HYBRID_FOLDER, names=GGUF_NAMES, rows=mamba_rows, stacks=None, in_memory=None)
)
