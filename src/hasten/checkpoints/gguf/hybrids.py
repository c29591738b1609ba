"""The architectures of GGUF files whose layers keep states: Qwen3-Next, Qwen 3.5 to 3.8, and LFM2."""

from collections.abc import Container

import numpy as np

from hasten.checkpoints.gguf.architecture import (
    NORM_AFTER_ATTENTION,
    SIGMOID,
    Architecture,
    Own,
    Values,
    first_experts,
    kinds_by_heads,
    layers_read,
)
from hasten.model.config import ModelConfig
from hasten.model.mixer_config import DeltaConfig

# The size of a value is not stated: all heads of values have `ssm.inner_size` elements.
NUMBERS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
EXPERT_NUMBERS = NUMBERS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}


def delta_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """Sizes of Gated DeltaNet, and which layers have it, where a file says it of each."""
    values, inner, heads = layers_read(own, found), own.get("ssm.inner_size"), own.get("ssm.time_step_rank")
    if type(inner) is int and type(heads) is int and heads > 0:
        values["linear_value_head_dim"] = inner // heads
    each = own.get("attention.recurrent_layers")
    if isinstance(each, list | np.ndarray):
        values["layer_types"] = ["linear_attention" if one else "full_attention" for one in each]
    return values


def qwen3_next_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    return delta_read(own, found, tensors) | {"norm_topk_prob": True, "mlp_only_layers": []}


def delta_write(config: ModelConfig) -> Values:
    sizes = config.mixer
    assert isinstance(sizes, DeltaConfig)
    return {
        "ssm.conv_kernel": sizes.kernel,
        "ssm.state_size": sizes.key_dim,
        "ssm.group_count": sizes.key_heads,
        "ssm.time_step_rank": sizes.value_heads,
        "ssm.inner_size": sizes.values,
        "full_attention_interval": [layer.keeps_state for layer in config.layers].index(False) + 1,
        "expert_shared_feed_forward_length": config.shared_size or None,
    }


def qwen3_5_write(config: ModelConfig) -> Values:
    """With the number of pairs of a head that turn by the time, row and column of an image's token, alike in text."""
    pairs = config.ropes[0].dim // 2
    return delta_write(config) | {"rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]}


def lfm2_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """A layer without key heads has a convolution; the sizes of MLPs are those that they have."""
    values = kinds_by_heads(own, "conv", "full_attention")
    return values | {"norm_eps": found.get("rms_norm_eps"), "block_auto_adjust_ff_dim": False}


def lfm2_moe_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    count = found.get("num_hidden_layers")
    biased = type(count) is int and f"blk.{count - 1}.exp_probs_b.bias" in tensors
    return {"layer_types": None, "use_expert_bias": biased} | lfm2_read(own, found, tensors)


def lfm2_write(config: ModelConfig) -> Values:
    kept = [0 if layer.keeps_state else config.kv_heads for layer in config.layers]
    return {
        "attention.head_count_kv": kept,
        "shortconv.l_cache": None if config.mixer is None else config.mixer.kernel,
        "leading_dense_block_count": first_experts(config),
        "expert_gating_func": SIGMOID if config.experts else None,
    }


LFM2_PARTS = {"norm": "token_embd_norm", "mixer.conv": "shortconv.conv", "mixer.out": "shortconv.out_proj"}
LFM2_PARTS |= dict.fromkeys(("mixer.key", "mixer.query", "mixer.value"), "shortconv.in_proj")
HYBRIDS = {
    "lfm2": Architecture(
        family="lfm2",
        numbers={"shortconv.l_cache": "conv_L_cache"},
        read=lfm2_read,
        write=lfm2_write,
        parts=LFM2_PARTS,
        lists=("attention.head_count_kv",),
    ),
    "lfm2moe": Architecture(
        family="lfm2_moe",
        numbers={"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
        read=lfm2_moe_read,
        write=lfm2_write,
        parts=LFM2_PARTS,
        lists=("attention.head_count_kv",),
        experts=True,
    ),
    "qwen3next": Architecture(
        family="qwen3_next",
        numbers=EXPERT_NUMBERS,
        read=qwen3_next_read,
        write=delta_write,
        parts=NORM_AFTER_ATTENTION | {"mixer.beta": "ssm_ba", "mixer.decay": "ssm_ba"},
        alternating=("mixer.beta", "mixer.decay"),
        experts=True,
        partial=True,
    ),
    "qwen35": Architecture(
        family="qwen3_5_text",
        numbers=NUMBERS,
        read=delta_read,
        write=qwen3_5_write,
        parts=NORM_AFTER_ATTENTION,
        tiled=True,
        partial=True,
    ),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text",
        numbers=EXPERT_NUMBERS,
        read=delta_read,
        write=qwen3_5_write,
        parts=NORM_AFTER_ATTENTION,
        tiled=True,
        experts=True,
        partial=True,
    ),
}
