"""The architectures of GGUF files: what each states otherwise than Llama, for reading and writing.

An architecture is a row of `ARCHITECTURES`. What llama.cpp does where a file says nothing is in `read`; `write` gives
the metadata that a config needs beside those of `names.FIELDS`. Whether a file can state a config is not asked here:
what was written is read again and compared (`write.config_entries`).
"""

from collections.abc import Callable, Container
from typing import Any, Literal

import numpy as np

from hasten.checkpoints.gguf.architecture import (
    NORM_AFTER_ATTENTION,
    ROUTED_NUMBERS,
    SIGMOID,
    Architecture,
    Own,
    Values,
    first_experts,
    groups_read,
    kinds_of_layers,
    layers_read,
    routed_write,
    windows,
)
from hasten.checkpoints.gguf.gemma4 import GEMMA4
from hasten.checkpoints.gguf.granite import GRANITE
from hasten.checkpoints.gguf.hybrids import HYBRIDS
from hasten.checkpoints.gguf.latent import LATENT
from hasten.model.config import ModelConfig


def llama_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    return {"model_type": "mixtral"} if own.get("expert_count") else {}


def mistral3_write(config: ModelConfig) -> Values:
    rope = config.ropes[0]
    plain = rope.scaling == "yarn" and rope.factor > 1 and rope.attention_factor == 1.0
    return {
        "attention.temperature_scale": rope.query_beta or None,
        "rope.scaling.yarn_log_multiplier": 1.0 if plain else None,
    }


def gemma_read(most_layers: int) -> Callable[[Own, Values, Container[str]], Values]:
    """For Gemma 2 and 3: the largest model, known by its number of layers, divides scores by another number."""

    def read(own: Own, found: Values, tensors: Container[str]) -> Values:
        hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
        share: Any = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
        wide = most_layers == found.get("num_hidden_layers")
        values: Values = {"query_pre_attn_scalar": share if wide and share else found.get("head_dim")}
        if isinstance(own.get("attention.sliding_window_pattern"), list | np.ndarray):  # which layers have the window
            values["layer_types"] = kinds_of_layers(own, found, 0)
        return values

    return read


def gemma_write(config: ModelConfig) -> Values:
    windowed = [layer.window for layer in config.layers]
    return {
        "attention.sliding_window": max(filter(None, windowed), default=1),
        "attention.sliding_window_pattern": [*windowed, None].index(None) + 1,
        "rope.freq_base_swa": config.ropes[0].theta,
    }


def olmo2_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """OLMo 3 is an OLMo 2 with windows, whose windowed layers are not stretched. llama.cpp has one base for all."""
    if not own.get("attention.sliding_window"):
        return {}
    base = {"rope_theta": own.get("rope.freq_base", 10_000.0)}
    tables = {"full_attention": base, "sliding_attention": base}
    return {"model_type": "olmo3", "layer_types": kinds_of_layers(own, found, 4), "rope_parameters": tables}


def olmo2_write(config: ModelConfig) -> Values:
    return windows(config) if config.family == "olmo3" else {}


EXAONE_32B = 64  # layers of the model that has windows


def exaone4_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    if found.get("num_hidden_layers") != EXAONE_32B:
        return {"sliding_window": None}
    window = own.get("attention.sliding_window", 4096) or None
    return {"sliding_window": window, "layer_types": kinds_of_layers(own, found, 4)}


def exaone4_write(config: ModelConfig) -> Values:
    return windows(config) if len(config.layers) == EXAONE_32B else {}


def minimax_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    values = {"rotary_dim": own["rope.dimension_count"]} if "rope.dimension_count" in own else {}
    size = own.get("expert_feed_forward_length")
    return values | scores(own) | ({} if size is None else {"intermediate_size": size})


def scores(own: Own) -> Values:
    """What the family refuses unless experts are scored by a sigmoid."""
    return {} if own.get("expert_gating_func", SIGMOID) == SIGMOID else {"scoring_func": "softmax"}


def dots1_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    norm = own.get("expert_weights_norm", False)
    return scores(own) | groups_read(own) | {"norm_topk_prob": norm, "n_routed_experts": found.get("num_experts")}


def glm4_moe_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    normed = "blk.0.attn_q_norm.weight" in tensors
    return layers_read(own, found) | dots1_read(own, found, tensors) | {"use_qk_norm": normed}


def ernie_moe_write(config: ModelConfig) -> Values:
    return {
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": first_experts(config),
        "expert_shared_count": config.shared_size // config.expert_size,
        "expert_shared_feed_forward_length": config.shared_size,
    }


def qwen2_moe_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    return {"norm_topk_prob": False, "qkv_bias": "blk.0.attn_q.bias" in tensors, "mlp_only_layers": []}


def seed_oss_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def gpt_oss_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """The files state no pattern of windows, and no truncation of yarn, which the family's authors leave out."""
    size = own.get("expert_feed_forward_length")
    return {
        "attention_bias": True,
        "layer_types": kinds_of_layers(own, found, 2),
        "rope_scaling": {"rope_type": "default", "truncate": False},
    } | ({} if size is None else {"intermediate_size": size})


def gpt_oss_write(config: ModelConfig) -> Values:
    return {"attention.sliding_window": windows(config)["attention.sliding_window"]}


ERNIE_NUMBERS = {
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
    "expert_shared_count": "moe_num_shared_experts",
}
GATE_UP = dict.fromkeys(("mlp.gate", "mlp.up"), "ffn_up")  # one matrix, here as in its Hugging Face folder
QKV = dict.fromkeys(("attention.q", "attention.k", "attention.v"), "attn_qkv")
BIASES: tuple[Literal["output", "mlp"], ...] = ("output", "mlp")

ARCHITECTURES = {
    "llama": Architecture(family="llama", read=llama_read, reordered=True, experts=True, biases=BIASES),
    "mistral3": Architecture(family="ministral3", reordered=True, write=mistral3_write, biases=BIASES),
    "qwen2": Architecture(family="qwen2", square=True),
    "qwen2moe": Architecture(
        family="qwen2_moe",
        numbers={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        read=qwen2_moe_read,
        write=lambda config: {"expert_shared_feed_forward_length": config.shared_size},
        experts=True,
        square=True,
        head="own",
    ),
    "qwen3": Architecture(family="qwen3"),
    "qwen3moe": Architecture(
        family="qwen3_moe",
        read=lambda own, found, tensors: {"norm_topk_prob": True},
        experts=True,
    ),
    "phi3": Architecture(
        family="phi3",
        write=lambda config: {"attention.sliding_window": config.layers[0].window},
        parts=GATE_UP | QKV,
        square=True,
        partial=True,
    ),
    "gemma": Architecture(family="gemma", partial=True, head="tied"),
    "gemma2": Architecture(family="gemma2", read=gemma_read(46), write=gemma_write, partial=True, head="tied"),
    "gemma3": Architecture(family="gemma3_text", read=gemma_read(62), write=gemma_write, partial=True, windowed=True),
    "gemma4": GEMMA4,
    "starcoder2": Architecture(
        family="starcoder2",
        read=lambda own, found, tensors: {"use_bias": True},
        layer_norm="norm_epsilon",
        biases=BIASES,
        square=True,
    ),
    "smollm3": Architecture(
        family="smollm3",
        read=lambda own, found, tensors: {"no_rope_layer_interval": 4},
        reordered=True,
    ),
    "arcee": Architecture(family="arcee", reordered=True),
    "nemotron": Architecture(
        family="nemotron",
        layer_norm="norm_eps",
        biases=BIASES,
        square=True,
        partial=True,
        head="own",
    ),
    "seed_oss": Architecture(family="seed_oss", read=seed_oss_read, parts=NORM_AFTER_ATTENTION),
    "hunyuan-dense": Architecture(family="hunyuan_v1_dense"),
    "olmo2": Architecture(family="olmo2", read=olmo2_read, write=olmo2_write, square=True, head="own"),
    "olmoe": Architecture(
        family="olmoe",
        read=lambda own, found, tensors: {"norm_topk_prob": False},
        experts=True,
        square=True,
        equal_heads=True,
        head="own",
    ),
    "exaone4": Architecture(family="exaone4", read=exaone4_read, write=exaone4_write, square=True),
    "glm4": Architecture(family="glm4", parts=GATE_UP, partial=True),
    "glm4moe": Architecture(
        family="glm4_moe",
        numbers=ROUTED_NUMBERS,
        read=glm4_moe_read,
        write=routed_write,
        parts=NORM_AFTER_ATTENTION,
        experts=True,
        partial=True,
    ),
    "ernie4_5": Architecture(family="ernie4_5", read=lambda own, found, tensors: {"use_bias": False}),
    "ernie4_5-moe": Architecture(
        family="ernie4_5_moe",
        numbers=ERNIE_NUMBERS,
        read=lambda own, found, tensors: {"moe_layer_end_index": -1},
        write=ernie_moe_write,
        experts=True,
    ),
    "cohere2": Architecture(
        family="cohere2",
        numbers={"logit_scale": "logit_scale"},
        read=lambda own, found, tensors: {"layer_types": kinds_of_layers(own, found, 4)},
        write=lambda config: windows(config) | {"logit_scale": config.logit_scale},
        layer_norm="layer_norm_eps",
        square=True,
        partial=True,
        head="tied",
        windowed=True,
    ),
    "dots1": Architecture(
        family="dots1",
        numbers=ROUTED_NUMBERS,
        read=dots1_read,
        write=routed_write,
        experts=True,
        equal_heads=True,
        head="own",
    ),
    "gpt-oss": Architecture(
        family="gpt_oss",
        read=gpt_oss_read,
        write=gpt_oss_write,
        parts=NORM_AFTER_ATTENTION,
        experts=True,
        head="own",
        biases=BIASES,
        windowed=True,
    ),
    "minimax-m2": Architecture(
        family="minimax_m2",
        read=minimax_read,
        write=lambda config: {"expert_gating_func": SIGMOID},
        experts=True,
        partial=True,
        head="own",
    ),
    "apertus": Architecture(family="apertus"),
}
ARCHITECTURES |= GRANITE | HYBRIDS | LATENT
# The architecture that states a family; a "llama" with experts is a Mixtral.
OF_FAMILY = {row.family: name for name, row in ARCHITECTURES.items()}
OF_FAMILY |= {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2"}
OF_FAMILY |= dict.fromkeys(("deepseek_v2", "glm4_moe_lite", "youtu"), "deepseek2")


def architecture_of(config: ModelConfig) -> str:
    """The architecture that states a model; to llama.cpp a Granite 4 whose layers all have attention is a Granite 3."""
    if config.family == "granitemoehybrid" and not config.keeps_states:
        return "granitemoe" if config.experts else "granite"
    return OF_FAMILY[config.family]
