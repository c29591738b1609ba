"""Gemma 4 in GGUF files: heads of two sizes, shared keys, per-layer embeddings, experts beside MLPs."""

from collections.abc import Container
from typing import Any

import numpy as np

from hasten.checkpoints.gguf.architecture import Architecture, Own, Values, kinds_of_layers, windows
from hasten.model.config import ModelConfig

# The sizes without "swa" are those of global layers, which have no window.
NUMBERS = {
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_used_count": "top_k_experts",
}
LISTS = ("attention.head_count_kv", "feed_forward_length")
PARTS = {
    "token_features.embedding": "per_layer_token_embd",
    "token_features.projection": "per_layer_model_proj",
    "token_features.norm": "per_layer_proj_norm",
    "token_gate.reduce": "inp_gate",
    "token_gate.expand": "proj",
    "token_gate.norm": "post_norm",
    "mlp.expert_norm": "pre_ffw_norm_2",
    "mlp.shared_post_norm": "post_ffw_norm_1",
    "mlp.expert_post_norm": "post_ffw_norm_2",
} | {f"mlp.shared.{part}": f"ffn_{part}" for part in ("gate", "up", "down")}


def gemma4_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    kinds = kinds_of_layers(own, found, 6)
    kinds = [*kinds[:-1], "full_attention"]  # the last one is, whatever a file says
    whole = kinds.index("full_attention")
    heads, inner = (numbers_of(own.get(key)) for key in LISTS)
    values: Values = {
        "layer_types": kinds,
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in tensors,
        "vocab_size_per_layer_input": found["vocab_size"],
        "enable_moe_block": bool(own.get("expert_count")),
    }
    if inner:
        values |= {"intermediate_size": inner[0], "use_double_wide_mlp": len(set(inner)) > 1}
    if heads:
        of_kind = dict(zip(kinds, heads, strict=False))
        values |= {"num_key_value_heads": of_kind.get("sliding_attention", heads[0])}
        values |= {"num_global_key_value_heads": of_kind.get("full_attention")}
    return values


def numbers_of(value: Any) -> list[Any]:
    """A number of each layer as Python's; none where it is one for all."""
    return np.asarray(value).tolist() if isinstance(value, list | np.ndarray) else []


def gemma4_write(config: ModelConfig) -> Values:
    local, whole = config.ropes
    heads, inner = [config.kv_heads_of(layer) for layer in config.layers], [config.inner_of(i) for i in config.layers]
    return windows(config) | {
        "attention.key_length": whole.dim,
        "attention.value_length": whole.dim,
        "attention.key_length_swa": local.dim,
        "attention.value_length_swa": local.dim,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.shared_kv_layers": len(config.layers) - config.first_without_keys,
        "feed_forward_length": inner if len(set(inner)) > 1 else inner[0],
        "embedding_length_per_layer_input": config.token_features,
        "rope.dimension_count_swa": local.dim,
        "rope.freq_base_swa": local.theta,
    }


GEMMA4 = Architecture(
    family="gemma4_text",
    numbers=NUMBERS,
    lists=LISTS,
    read=gemma4_read,
    write=gemma4_write,
    parts=PARTS,
    proportional=True,
    joined=True,
    experts=True,
    partial=True,
)
