"""Mixtral (arXiv 2401.04088): Mistral with eight experts a layer, two for each token."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import LLAMA_NAMES, Family, expert_counts, llama_config, window_of


def config(fields: Fields) -> ModelConfig:
    return llama_config(
        fields,
        theta=1_000_000.0,
        window=window_of(fields),
        has_experts=lambda layer: True,
        **expert_counts(fields, "num_local_experts", "num_experts"),
        expert_size=fields.integer("intermediate_size"),
    )


NAMES = LLAMA_NAMES | {"mlp": "block_sparse_moe", "gate": "w1", "down": "w2", "up": "w3"}

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILY = Family("mixtral", "MixtralForCausalLM", config, NAMES, defaults=DEFAULTS)
