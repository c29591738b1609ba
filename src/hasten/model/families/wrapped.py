"""Checkpoints of models that also read images or sound: the text model's part of their config and of their tensors.

Their config.json has the text model's in `text_config`; its weights are under a prefix, beside those of the towers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model_type around a text model.

    text: the text model's own model_type, where its config leaves it out. tied: default of `tie_word_embeddings`.
    flat: older files have the text model's fields beside the outer ones.
    """

    text: str
    tied: bool = False
    flat: bool = False


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper("gemma3_text", tied=True),
    "gemma4": Wrapper("gemma4_text", tied=True),
    "mistral3": Wrapper("mistral", tied=True),
    "qwen2_vl": Wrapper("qwen2_vl_text", flat=True),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", flat=True),
    "qwen3_vl": Wrapper("qwen3_vl_text"),
    "lfm2_vl": Wrapper("lfm2", tied=True),
    "qwen3_5": Wrapper("qwen3_5_text"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text"),
    "internvl": Wrapper("qwen2", tied=True),
    "llava": Wrapper("llama"),
    "llava_next": Wrapper("llama"),
    "llava_onevision": Wrapper("qwen2"),
    "idefics3": Wrapper("llama"),
    "smolvlm": Wrapper("llama"),
}

# Text models that compute what a family of ours does, with the defaults in which they differ from it: for text the
# three positions of their rotary tables (mrope) are one.
_QWEN2_VL = ("qwen2", {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80})
_EQUALS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": ("qwen3", {"rope_theta": 5e5, "max_position_embeddings": 128_000}),
    "kimi_k2": ("deepseek_v3", {}),
}

# The text model's weights by how their names begin, and how ours do.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
_TOWERS = {
    "vision_tower": "vision tower",
    "vision_model": "vision tower",
    "visual": "vision tower",
    "audio_tower": "audio tower",
    "multi_modal_projector": "projector",
    "embed_vision": "projector",
    "embed_audio": "projector",
    "connector": "projector",
    "image_newline": "projector",
    "mtp": "multi-token prediction head",
}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _wrapper(values: Mapping[str, Any]) -> Wrapper | None:
    kind = values.get("model_type")
    return WRAPPERS.get(kind) if isinstance(kind, str) else None


def text_config(values: Mapping[str, Any], where: str = "config.json") -> tuple[Mapping[str, Any], str]:
    """The text model's own config, as a file of its own would hold it, and what errors call it."""
    wrapper = _wrapper(values)
    if wrapper is not None:
        values, where = _unwrapped(values, wrapper, where)
    family, defaults = _EQUALS.get(str(values.get("model_type")), (None, {}))
    if family is None:
        return values, where
    found = dict(defaults) | dict(values) | {"model_type": family}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(given := found.get(name), dict):
            kept = {key: value for key, value in given.items() if not key.startswith("mrope_")}
            plain = {key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"}
            found[name] = kept | plain
    return found, where


def _unwrapped(values: Mapping[str, Any], wrapper: Wrapper, where: str) -> tuple[dict[str, Any], str]:
    section = Fields(values, where).section("text_config")
    if section is not None:
        inner, where = dict(section.values), section.where
    elif wrapper.flat:
        inner = {name: value for name, value in values.items() if name not in ("model_type", "vision_config")}
    else:
        raise CheckpointError(f"{where} lacks 'text_config', which a {values['model_type']} needs")
    shared = {name: values[name] for name in (*_IDS, "dtype", "torch_dtype") if values.get(name) is not None}
    # Older files have it in either config; where the weights differ after all, loading keeps both.
    given = [one["tie_word_embeddings"] for one in (values, inner) if "tie_word_embeddings" in one]
    tied = True if True in given else next(iter(given), wrapper.tied)
    return {"model_type": wrapper.text} | shared | inner | {"tie_word_embeddings": tied}, where


def text_tensors(values: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, str], Counter[str]]:
    """The tensors of a checkpoint's text model, {its own name: the checkpoint's}, and the number of each tower's."""
    wrapped = _wrapper(values) is not None
    kept: dict[str, str] = {}
    towers: Counter[str] = Counter()
    for name in names:
        part = name.removeprefix("model.").partition(".")[0]
        if part in _TOWERS and (wrapped or part == "mtp"):
            towers[_TOWERS[part]] += 1
            continue
        prefix = next((prefix for prefix in _PREFIXES if wrapped and name.startswith(prefix)), "")
        own = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if own in kept:
            raise CheckpointError(
                f"{kept[own]!r:.100} and {name!r:.100} are both {own!r:.100}; download the folder again"
            )
        kept[own] = name
    return kept, towers


def multi_token_tensors(names: Iterable[str]) -> dict[str, str]:
    """The tensors of a multi-token head, {its own name, from "mtp." on: the checkpoint's}."""
    own = {name.removeprefix("model."): name for name in names}
    return {name: stored for name, stored in own.items() if name.startswith("mtp.")}


def text_modules(values: Mapping[str, Any], given: Any, *, depth: int = 6) -> Any:
    """A quantization_config with the text model's own names of modules, in lists and as keys, for those it has."""
    if _wrapper(values) is None or not depth:
        return given
    if isinstance(given, dict):
        return {_module(key): text_modules(values, value, depth=depth - 1) for key, value in given.items()}
    if isinstance(given, list):
        return [text_modules(values, one, depth=depth - 1) for one in given]
    return _module(given)


def _module(name: Any) -> Any:
    """A module's name, or a pattern ("re:…") that begins with one."""
    if not isinstance(name, str):
        return name
    start = re.match(r"(re:)?\^?", name)
    assert start is not None
    rest = name[start.end() :]
    for prefix, own in _PREFIXES.items():
        for written in (prefix, prefix.replace(".", r"\."), prefix.removesuffix(".")):
            if rest.startswith(written):
                return start[0] + (own if written.endswith(".") else own.removesuffix(".")) + rest.removeprefix(written)
    return name


def skipped_towers(towers: Mapping[str, int]) -> str:
    """The towers in a sentence: "391 tensors of the vision tower and 4 of the projector"."""
    (what, count), *others = towers.items()
    first = f"{count} tensor{'s' * (count != 1)} of the {what}"
    return " and ".join([first, *(f"{count} of the {what}" for what, count in others)])
