"""Phi 3, 3.5 and 4-mini (arXiv 2404.14219): Llama with q, k, v and gate, up stored fused, and longrope."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import LLAMA_NAMES, Family, RowSlice, llama_config, qkv_rows, window_of


def config(fields: Fields) -> ModelConfig:
    # Early files call their longrope "su" or "yarn".
    kinds = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
    return llama_config(fields, window=window_of(fields), rope_kinds=kinds)


NAMES = LLAMA_NAMES | dict.fromkeys("qkv", "qkv_proj") | dict.fromkeys(("gate", "up"), "gate_up_proj")


def rows(config: ModelConfig) -> dict[str, RowSlice]:
    size = config.intermediate_size
    return qkv_rows(config) | {"gate": RowSlice(0, size), "up": RowSlice(size, 2 * size)}


DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
FAMILY = Family("phi3", "Phi3ForCausalLM", config, NAMES, rows, defaults=DEFAULTS)
