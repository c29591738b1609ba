"""The architectures of GGUF files with latent attention: DeepSeek V2 and V3, GLM 4.7 Flash, Youtu; Mistral Small 4.

Newer files state the heads of the absorbed form, one key of rank + turned_dim numbers for all, and the expanded heads
under names that end in "_mla". Older ones state the expanded heads alone.
"""

import math
from collections.abc import Container

import numpy as np

from hasten.checkpoints.gguf.architecture import (
    ROUTED_NUMBERS,
    SIGMOID,
    SOFTMAX,
    Architecture,
    Own,
    Values,
    groups_read,
    layers_read,
    routed_write,
)
from hasten.model.config import ModelConfig

# GLM 4.7 Flash, whose first files do not say how experts are scored: its layers (the 48th predicts) and its tokens.
GLM_LAYERS, GLM_TOKENS = (47, 48), 154_880
MULTIPLIER = 0.1  # `rope.scaling.yarn_log_multiplier` is this share of `mscale_all_dim`


def latent_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """Sizes of latent attention and of experts. The family is the one that chooses experts as the file says."""
    turned = own.get("rope.dimension_count")
    whole = own.get("attention.key_length_mla", own.get("attention.key_length"))
    sized = type(whole) is int and type(turned) is int
    table = {"rope_type": "default"}
    if weight := own.get("rope.scaling.yarn_log_multiplier"):
        table |= dict.fromkeys(("mscale", "mscale_all_dim"), round(weight / MULTIPLIER, 6))
    values: Values = layers_read(own, found) | {
        "q_lora_rank": own.get("attention.q_lora_rank") or None,
        "qk_nope_head_dim": whole - turned if sized else None,
        "qk_rope_head_dim": turned,
        "v_head_dim": own.get("attention.value_length_mla", own.get("attention.value_length")),
        "head_dim": turned,
        "num_key_value_heads": found.get("num_attention_heads"),
        "rope_scaling": table,
    }
    if not own.get("expert_count"):
        return values | {"model_type": "youtu"}
    normed, groups = own.get("expert_weights_norm", False), groups_read(own)
    normed = normed.tolist() if isinstance(normed, np.ndarray) else normed  # which is no flag, and refused
    flash = found.get("num_hidden_layers") in GLM_LAYERS and found["vocab_size"] == GLM_TOKENS
    scores = own.get("expert_gating_func") or (SIGMOID if flash else SOFTMAX)
    values |= groups | {
        "n_routed_experts": found.get("num_experts"),
        "first_k_dense_replace": own.get("leading_dense_block_count", 0),
        "norm_topk_prob": normed,
        "routed_scaling_factor": own.get("expert_weights_scale") or 1.0,
    }
    if scores == SIGMOID:
        return values
    if scores == SOFTMAX and normed is True:
        return values | {"model_type": "mistral4"}
    known = {"model_type": "deepseek_v2", "scoring_func": "softmax" if scores == SOFTMAX else f"llama.cpp's {scores}"}
    return values | known | ({} if groups["n_group"] == 1 else {"topk_method": "group_limited_greedy"})


def latent_write(config: ModelConfig) -> Values:
    sizes, rope = config.latent, config.ropes[0]
    assert sizes is not None, "these families have latent attention"
    values: Values = {
        "attention.value_length": sizes.rank,
        "attention.key_length_mla": sizes.query_dim,
        "attention.value_length_mla": sizes.value_dim,
        "attention.kv_lora_rank": sizes.rank,
        "attention.q_lora_rank": sizes.query_rank or 0,
        "attention.temperature_scale": rope.query_beta or None,
        "attention.temperature_length": rope.original_positions if rope.query_beta else None,
    }
    if rope.scaling == "yarn" and rope.factor > 1:
        # What the scale has beside the size of a head: see `families.latent`.
        stretched = math.sqrt(config.layers[0].scale * sizes.query_dim**0.5) - 1
        weight = round(stretched / (0.1 * math.log(rope.factor)), 6)
        values["rope.scaling.yarn_log_multiplier"] = MULTIPLIER * weight or None
    if config.experts:
        return values | routed_write(config)
    # llama.cpp asks for both of a model without experts, too.
    without = {"expert_feed_forward_length": config.intermediate_size, "expert_shared_count": 0}
    return values | without | {"leading_dense_block_count": len(config.layers)}


def mistral4_write(config: ModelConfig) -> Values:
    """llama.cpp supposes an `mscale` of 1 here, and in a deepseek2 the one of all dimensions."""
    values = latent_write(config)
    plain = values.get("rope.scaling.yarn_log_multiplier") == MULTIPLIER
    return values | ({} if plain else {"rope.scaling.yarn_log_multiplier": None})


NUMBERS = ROUTED_NUMBERS | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length_mla": "v_head_dim",
}
PARTS = {
    "attention.q_down": "attn_q_a",
    "attention.q_norm": "attn_q_a_norm",
    "attention.q_up": "attn_q_b",
    "attention.kv_down": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.kv_up": "attn_kv_b",
}
LATENT = {
    "deepseek2": Architecture(
        family="deepseek_v3",
        numbers=NUMBERS,
        read=latent_read,
        write=latent_write,
        parts=PARTS,
        latent=True,
        experts=True,
        partial=True,
    ),
    "mistral4": Architecture(
        family="mistral4",
        numbers=NUMBERS,
        read=latent_read,
        write=mistral4_write,
        parts=PARTS,
        joined=True,
        latent=True,
        experts=True,
        partial=True,
    ),
}
