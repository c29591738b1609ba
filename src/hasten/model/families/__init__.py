"""The model families: for each, how a config.json is read and where every weight stands in the checkpoint."""

from collections.abc import Mapping
from typing import Any

from hasten.errors import CheckpointError
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


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json; CheckpointError lists the known ones if it is none of them."""
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type is {str(model_type)[:80]!r}, which hasten does not know; "
            f"it knows {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[str(model_type)]


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed config.json; CheckpointError names the field that is missing, mistyped or out of range."""
    return family_of(values).config(Fields(values))
