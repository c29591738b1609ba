"""The architectures of GGUF files of Granite: dense, with experts, and with Mamba-2 in most layers."""

from collections.abc import Container
from dataclasses import replace
from typing import Literal

import numpy as np

from hasten.checkpoints.gguf.architecture import MOST_LAYERS, Architecture, Own, Values, kinds_by_heads
from hasten.model.config import ModelConfig
from hasten.model.mixer_config import MambaConfig

SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
SHARED, TURNED = "expert_shared_feed_forward_length", "rope.scaling.finetuned"


def granite_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """A Granite 3, or a Granite 4 whose layers all have attention.

    As a Granite 4 is read what a Granite 3 has not: experts beside an MLP for every token, and no rotary positions.
    """
    each, head = own.get("attention.head_count_kv"), found.get("head_dim")
    values: Values = {"num_local_experts": own["expert_count"]} if "expert_count" in own else {}
    if isinstance(each, list | np.ndarray):  # llama.cpp's converter states it of each layer of a Granite 4
        each = np.asarray(each).tolist()
        values["num_key_value_heads"] = each[0] if len(set(each)) == 1 else each  # else it is refused
    if not own.get("attention.scale") and type(head) is int and head > 0:
        values["attention_multiplier"] = head**-0.5
    beside = bool(own.get("expert_count") and own.get(SHARED))
    return values | (_granite_4(own, found) if beside or own.get(TURNED) is False else {})


def _granite_4(own: Own, found: Values) -> Values:
    """A Granite 4 of attention alone. Without experts the MLP for every token is all, of the model's size."""
    count, experts = found.get("num_hidden_layers"), own.get("expert_count", 0)
    return {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * (min(count, MOST_LAYERS) if type(count) is int else 0),
        "position_embedding_type": "nope" if own.get(TURNED) is False else "rope",
        "num_local_experts": experts,
        "shared_intermediate_size": own.get(SHARED, 0) if experts else found.get("intermediate_size"),
    }


def granite_write(config: ModelConfig) -> Values:
    return {
        "attention.scale": next(layer.scale for layer in config.layers if not layer.keeps_state),
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
        SHARED: config.shared_size or None,
        TURNED: bool(config.ropes),  # by which llama.cpp knows whether to rotate at all
    }


def granite_hybrid_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """A layer without key heads has Mamba-2; one number of key heads is that of all layers."""
    inner, heads, hidden = own.get("ssm.inner_size"), own.get("ssm.time_step_rank"), found.get("hidden_size")
    values = granite_read(own, found, tensors) | _granite_4(own, found) | kinds_by_heads(own, "mamba", "attention")
    kinds = [*values["layer_types"], "mamba", "attention"]
    attending, keeping = kinds.index("attention"), kinds.index("mamba")
    values |= {
        "attention_bias": f"blk.{attending}.attn_q.bias" in tensors,
        "mamba_conv_bias": f"blk.{keeping}.ssm_conv1d.bias" in tensors,
    }
    if type(inner) is int and type(hidden) is int and type(heads) is int and hidden > 0 and heads > 0:
        values |= {"mamba_expand": inner // hidden, "mamba_d_head": inner // heads}
    return values


def granite_hybrid_write(config: ModelConfig) -> Values:
    sizes = config.mixer
    assert isinstance(sizes, MambaConfig)
    return granite_write(config) | {
        "attention.head_count_kv": [0 if layer.keeps_state else config.kv_heads for layer in config.layers],
        "ssm.conv_kernel": sizes.kernel,
        "ssm.state_size": sizes.state_dim,
        "ssm.group_count": sizes.groups,
        "ssm.time_step_rank": sizes.heads,
        "ssm.inner_size": sizes.values,
    }


BIASES: tuple[Literal["output", "mlp"], ...] = ("output", "mlp")
DENSE = Architecture(
    family="granite",
    numbers=SCALES,
    read=granite_read,
    write=granite_write,
    lists=("attention.head_count_kv",),
    reordered=True,
    biases=BIASES,
)
GRANITE = {
    "granite": DENSE,
    # llama.cpp turns heads here whatever the file says.
    "granitemoe": replace(DENSE, family="granitemoe", experts=True, positions=True),
    "granitehybrid": Architecture(
        family="granitemoehybrid",
        numbers=SCALES | MAMBA,
        read=granite_hybrid_read,
        write=granite_hybrid_write,
        parts=dict.fromkeys((f"mixer.{part}" for part in ("z", "value", "key", "query", "step")), "ssm_in"),
        lists=("attention.head_count_kv",),
        reordered=True,
        experts=True,
        biases=BIASES,
    ),
}
