"""Phi 3, 3.5 and 4-mini (arXiv 2404.14219): Llama with q, k, v and gate, up stored fused, and longrope."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, Places, TensorSlice, llama_config, llama_places, window_of


def config(fields: Fields) -> ModelConfig:
    # Early files call their longrope "su" or "yarn".
    kinds = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
    return llama_config(fields, window=window_of(fields), rope_kinds=kinds)


def places(config: ModelConfig) -> Places:
    q, kv, size = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate_size
    parts = {
        "q_proj": ("qkv_proj", 0, q),
        "k_proj": ("qkv_proj", q, q + kv),
        "v_proj": ("qkv_proj", q + kv, q + 2 * kv),
        "gate_proj": ("gate_up_proj", 0, size),
        "up_proj": ("gate_up_proj", size, 2 * size),
    }
    for ours, piece in llama_places(config):
        last = piece.name.split(".")[-2]
        if last in parts:
            fused, start, stop = parts[last]
            piece = TensorSlice(piece.name.replace(last, fused), start, stop)
        yield ours, piece


DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
FAMILY = Family("phi3", "Phi3ForCausalLM", config, places, defaults=DEFAULTS)
