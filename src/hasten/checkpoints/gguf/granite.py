"""The architectures of GGUF files of Granite: dense, with experts, and with Mamba-2 in most layers."""

from collections.abc import Container
from typing import Literal

from hasten.checkpoints.gguf.architecture import Architecture, Own, Values, kinds_by_heads
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
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}


def granite_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    head = found.get("head_dim")
    values: Values = {"num_local_experts": own["expert_count"]} if "expert_count" in own else {}
    if own.get("attention.scale") or type(head) is not int or head < 1:
        return values
    return values | {"attention_multiplier": head**-0.5}


def granite_write(config: ModelConfig) -> Values:
    return {
        "attention.scale": next(layer.scale for layer in config.layers if not layer.keeps_state),
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
    }


def granite_hybrid_read(own: Own, found: Values, tensors: Container[str]) -> Values:
    """A layer without key heads has Mamba-2. Without experts the MLP for every token is all, of the model's size."""
    inner, heads, hidden = own.get("ssm.inner_size"), own.get("ssm.time_step_rank"), found.get("hidden_size")
    values = kinds_by_heads(own, "mamba", "attention")
    kinds = [*values.get("layer_types", ()), "mamba", "attention"]
    attending, keeping = kinds.index("attention"), kinds.index("mamba")
    values |= granite_read(own, found, tensors) | {
        "attention_bias": f"blk.{attending}.attn_q.bias" in tensors,
        "mamba_conv_bias": f"blk.{keeping}.ssm_conv1d.bias" in tensors,
        "position_embedding_type": "nope" if own.get("rope.scaling.finetuned", True) is False else "rope",
    }
    if not own.get("expert_count"):
        values |= {"num_local_experts": 0, "shared_intermediate_size": found.get("intermediate_size")}
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
        "expert_shared_feed_forward_length": config.shared_size or None,
        "rope.scaling.finetuned": bool(config.ropes),  # by which llama.cpp knows whether to rotate at all
    }


BIASES: tuple[Literal["output", "mlp"], ...] = ("output", "mlp")
GRANITE = {
    "granite": Architecture(
        family="granite",
        numbers=SCALES,
        read=granite_read,
        write=granite_write,
        reordered=True,
        biases=BIASES,
    ),
    "granitemoe": Architecture(
        family="granitemoe",
        numbers=SCALES,
        read=granite_read,
        write=granite_write,
        reordered=True,
        experts=True,
        biases=BIASES,
    ),
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
