"""Named shapes of published models, for plans and benchmarks without a checkpoint. Importing it is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.errors import ConfigError
from hasten.model.config import ModelConfig


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a Llama 2 with these sizes; `changes` override its fields."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | changes


def gpt2(hidden: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a GPT-2 with these sizes; `changes` override its fields."""
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": 4 * hidden,
        "n_positions": 1024,
        "vocab_size": 50_257,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    } | changes


# name -> config.json; llama-7b and llama-70b are Llama 2's (arXiv 2307.09288), qwen3-0.6b is arXiv 2505.09388's;
# three of four layers of qwen3.5-0.8b are Gated DeltaNet.
SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": llama(64, 128, 2, 4, 2, vocab_size=250, max_position_embeddings=512),
    "llama-120m": llama(768, 2048, 12, 12, 4),
    "llama-1.1b": llama(2048, 5632, 22, 32, 4),
    "llama-7b": llama(4096, 11_008, 32, 32, 32),
    "llama-70b": llama(8192, 28_672, 80, 64, 8),
    "gpt2-124m": gpt2(768, 12, 12),
    "qwen3-0.6b": llama(1024, 3072, 28, 16, 8)
    | {
        "model_type": "qwen3",
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3.5-0.8b": llama(1024, 3584, 24, 8, 2)
    | {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": True,
    },
}


def check_shape(name: str) -> None:
    """Raise ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}; known: {', '.join(SHAPES)}")


def shape_config(name: str) -> ModelConfig:
    """The config of a named shape. Raises ConfigError for an unknown name."""
    from hasten.model.families import read_config

    check_shape(name)
    return read_config(SHAPES[name], f"shape {name}")
