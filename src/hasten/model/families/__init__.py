"""The model families: how to read the config.json of each, and where each weight is in the checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hasten.errors import CheckpointError, ConfigError
from hasten.model.config import Fields, ModelConfig
from hasten.model.families.cohere import COHERE2
from hasten.model.families.delta import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from hasten.model.families.family import Family
from hasten.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from hasten.model.families.gemma4 import GEMMA4
from hasten.model.families.glm import ERNIE4_5, ERNIE4_5_MOE, GLM, GLM4
from hasten.model.families.gpt import GPT2, GPT_BIGCODE
from hasten.model.families.gpt_oss import GPT_OSS
from hasten.model.families.granite_hybrid import GRANITE_HYBRID
from hasten.model.families.latent import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, YOUTU
from hasten.model.families.lfm2 import LFM2, LFM2_MOE
from hasten.model.families.llama import LLAMA, MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL, PHI3
from hasten.model.families.nemotron_h import NEMOTRON_H
from hasten.model.families.olmo import EXAONE4, OLMO2, OLMO3, OLMOE
from hasten.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from hasten.model.families.routed import DOTS1, GLM4_MOE, MINIMAX_M2
from hasten.model.families.variants import (
    APERTUS,
    ARCEE,
    GRANITE,
    GRANITE_MOE,
    HUNYUAN,
    NANOCHAT,
    NEMOTRON,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
)
from hasten.model.families.wrapped import WRAPPERS, text_config
from hasten.ops.attention.block_mask import tiles_refusal
from hasten.ops.attention.pattern_layout import Pattern
from hasten.ops.attention.pattern_text import pattern_of

DECLARED = (
    *(GPT2, GPT_BIGCODE, STARCODER2),
    *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL, PHI3),
    *(SEED_OSS, ARCEE, NEMOTRON, GRANITE, GRANITE_MOE, SMOLLM3, HUNYUAN, APERTUS, NANOCHAT),
    *(QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE),
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
    *(LFM2, LFM2_MOE, GRANITE_HYBRID, NEMOTRON_H),
    *(GEMMA, GEMMA2, GEMMA3, GEMMA4),
    *(OLMO2, OLMO3, OLMOE, EXAONE4),
    *(GLM, GLM4, ERNIE4_5, ERNIE4_5_MOE, COHERE2),
    *(DOTS1, GLM4_MOE, MINIMAX_M2, GPT_OSS),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, YOUTU),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in DECLARED}


def family_of(values: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family of a parsed config.json, or of the text model in it.

    CheckpointError lists the known ones if it is none of them.
    """
    return _text_model(values, where)[0]


def read_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a parsed config.json; CheckpointError names the field that is missing, mistyped or out of range.

    `where` is what errors call the file. Fields that are left out take the family's defaults.
    """
    family, values, where = _text_model(values, where)
    config = family.config(Fields(values, where, family.defaults))
    pattern = _attention_pattern(values, where)
    if pattern is None:
        return config
    if config.keeps_states:
        name = config.state_mixer.name
        raise CheckpointError(f"{where}: hasten.attention_pattern: layers with {name} have no sparse pattern")
    if config.latent is not None:
        raise CheckpointError(f"{where}: hasten.attention_pattern: latent attention has no sparse pattern")
    return replace(config, attention_pattern=pattern)


def _text_model(values: Mapping[str, Any], where: str) -> tuple[Family, Mapping[str, Any], str]:
    """The family of a parsed config.json, or of the text model in it; that model's config, and what errors call it."""
    if not _is_known(values):
        values, where = text_config(values, where)
    if not _is_known(values):
        known = f"{', '.join(sorted(FAMILIES))}; with their text model in text_config {', '.join(sorted(WRAPPERS))}"
        raise Fields(values, where).fail("model_type", f"one that hasten knows ({known})", values.get("model_type"))
    return FAMILIES[values["model_type"]], values, where


def _is_known(values: Mapping[str, Any]) -> bool:
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in FAMILIES


def _attention_pattern(values: Mapping[str, Any], where: str) -> Pattern | None:
    """The sparse pattern that hasten wrote, under `hasten.attention_pattern`."""
    own = values.get("hasten")
    given = own.get("attention_pattern") if isinstance(own, dict) else None
    if given is None:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: hasten.attention_pattern must be an object; found {given!r:.60}")
    try:
        pattern = pattern_of(given)
    except ConfigError as error:
        raise CheckpointError(f"{where}: hasten.attention_pattern: {error}") from None
    reason = tiles_refusal(pattern.block)
    if reason is not None and pattern.period is None:
        raise CheckpointError(f"{where}: hasten.attention_pattern: {reason}")
    return pattern
