"""The model families: for each, how a config.json is read and where every weight stands in the checkpoint."""

from collections.abc import Mapping
from typing import Any

from hasten.model.config import Fields, ModelConfig
from hasten.model.families import (
    gemma2,
    gemma3,
    gpt2,
    gpt_bigcode,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from hasten.model.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (gpt2, gpt_bigcode, llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, mixtral, qwen3_moe)
    for family in (module.FAMILY,)
}


def family_of(values: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family of a parsed config.json; CheckpointError lists the known ones if it is none of them."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise Fields(values, where).fail(
            "model_type", f"one that hasten knows: {', '.join(sorted(FAMILIES))}", model_type
        )
    return FAMILIES[model_type]


def read_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a parsed config.json; CheckpointError names the field that is missing, mistyped or out of range.

    `where` is what errors call the file. Fields that are left out take the family's defaults.
    """
    family = family_of(values, where)
    return family.config(Fields(values, where, family.defaults))
