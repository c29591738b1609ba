"""The config.json that a GGUF file's metadata come to."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hasten.checkpoints.gguf.architectures import ARCHITECTURES
from hasten.checkpoints.gguf.header import GGUFFile, shortest
from hasten.checkpoints.gguf.names import FIELDS, FREQUENCIES, LONG_ROPE
from hasten.errors import CheckpointError
from hasten.model.config import RopeConfig
from hasten.model.families import FAMILIES
from hasten.model.rope import frequencies

RMS_NORM, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Metadata that are computed with, and are numbers; the pattern of windows may be a list.
_NUMBERS = (*FIELDS, "rope.dimension_count", "rope.scaling.attn_factor", "rope.scale_linear", "rope.scaling.factor")
_NUMBERS += tuple(f"rope.scaling.{key}" for key in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow"))
_NUMBERS += ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale", LAYER_NORM)
_NUMBERS += ("rope.dimension_count_swa", "expert_gating_func", "nextn_predict_layers", "ssm.inner_size")
_NUMBERS += ("expert_group_count", "expert_group_used_count", "attention.key_length_mla")
_NUMBERS += tuple({key for row in ARCHITECTURES.values() for key in row.numbers})
UNTURNED = 1e20  # by which, or more, frequencies are divided of pairs that do not turn; llama.cpp writes 1e30
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_values(file: GGUFFile) -> dict[str, Any]:
    """The values of the model's config.json, were it published. Raises CheckpointError for what no family here has."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {architecture!r:.60}; hasten knows {', '.join(ARCHITECTURES)}"
        )
    own = {key.removeprefix(f"{architecture}."): value for key, value in file.metadata.items()}
    scaling = own.get("rope.scaling.type", "none")
    if not isinstance(scaling, str):
        raise CheckpointError(f"{file.path}: {architecture}.rope.scaling.type must be a text; found {scaling!r:.60}")
    row = ARCHITECTURES[architecture]
    for key in _NUMBERS:
        value = own.get(key, 0)
        listed = key in ("attention.sliding_window_pattern", *row.lists) and isinstance(value, list | np.ndarray)
        if not listed and (type(value) not in (int, float) or not math.isfinite(value)):
            raise CheckpointError(f"{file.path}: {architecture}.{key} must be a number; found {value!r:.60}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight: it is no whole model; download the model itself")
    if own.get("expert_count") and not row.experts:
        known = ", ".join(name for name, one in ARCHITECTURES.items() if one.experts)
        raise CheckpointError(f"{file.path}: experts are read of {known}; found {architecture}")
    if architecture == "gemma3" and "attention.sliding_window" not in own:
        raise CheckpointError(f"{file.path} lacks gemma3.attention.sliding_window; hasten reads gemma 3 with windows")
    names = {key: field for key, (field, _) in FIELDS.items()} | row.numbers
    names |= {} if row.layer_norm is None else {LAYER_NORM: row.layer_norm}
    found: dict[str, Any] = {field: own[key] for key, field in names.items() if key in own}
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if type(hidden) is int and type(heads) is int and heads > 0:
        found = {"num_key_value_heads": heads, "head_dim": hidden // heads} | found
    head: Any = found.get("head_dim")
    if "partial_rotary_factor" in FAMILIES[row.family].defaults:
        found["partial_rotary_factor"] = 1.0
    where = f"{file.path}: {architecture}.rope.dimension_count"
    found |= {} if row.proportional or row.latent else _partial(own.get("rope.dimension_count", head), head, where)
    if not found.get("sliding_window", 1):  # 0: none
        found["sliding_window"] = None
    found = {"model_type": row.family, "rope_theta": 10_000.0} | found
    found |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if isinstance(found.get("sliding_window_pattern"), list | np.ndarray):  # which says it of each layer
        del found["sliding_window_pattern"]
    found |= row.read(own, found, file.tensors)
    return found | (_proportional if row.proportional else _scaling)(own, found, file)


def _partial(turned: Any, head: Any, where: str) -> dict[str, Any]:
    """The share of a head's elements that rotary positions turn, where it is not all."""
    if turned == head or type(head) is not int or head < 1:
        return {}
    if type(turned) is not int or not 2 <= turned < head or turned % 2:
        raise CheckpointError(f"{where} is {turned!r:.40}; it must be even, and at most the {head} elements of a head")
    share = turned / head
    return {"partial_rotary_factor": share if int(head * share) == turned else (turned + 0.5) / head}


def _proportional(own: Mapping[str, Any], found: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """`rope_parameters` of local and of global layers; of these only the pairs turn whose factors are small."""
    size: Any = found.get("global_head_dim")
    local: Any = found.get("head_dim")
    for key, wanted in {"rope.dimension_count": size, "rope.dimension_count_swa": local}.items():
        if own.get(key, wanted) != wanted:
            raise CheckpointError(f"{file.path}: {key} is {own[key]!r:.40}; heads of {wanted} elements turn as a whole")
    whole = {"rope_type": "proportional", "rope_theta": found["rope_theta"], "partial_rotary_factor": 0.25}
    if (tensor := file.tensors.get(FREQUENCIES)) is not None:
        fits = tensor.type.name == "F32" and type(size) is int and tensor.shape == (size // 2,)
        factors = file.raw(FREQUENCIES).flatten().view(torch.float32) if fits else torch.zeros(0)
        turned = int((factors < UNTURNED).sum())
        if not turned or factors[0] <= 0 or (factors[:turned] != factors[0]).any():
            raise CheckpointError(f"{file.path}: {FREQUENCIES} is not as Gemma 4 scales rotary frequencies")
        share = 2 * turned / size
        share = share if int(share * size // 2) == turned else (2 * turned + 0.5) / size
        whole |= {"partial_rotary_factor": share, "factor": shortest(factors[0].item())}
    plain = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10_000.0)}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": plain}}


def _scaling(own: Mapping[str, Any], found: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """`rope_scaling`: linear and yarn by metadata, beside what was found, which counts; Llama 3's by its factors."""
    if FREQUENCIES in file.tensors:
        return {"rope_scaling": _llama3(found, file)}
    if all(name in file.tensors for name in LONG_ROPE):
        return _longrope(own, file)
    kind, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{file.path}: rope.scaling.type is {kind!r:.40}; none, linear and yarn are read")
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return {}
    names = {"original_context_length": "original_max_position_embeddings"}
    names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_log_multiplier": "mscale_all_dim"}
    given = {names[key]: own[f"rope.scaling.{key}"] for key in names if f"rope.scaling.{key}" in own}
    if given.get("mscale_all_dim"):
        given["mscale"] = 1.0
    if own.get("attention.temperature_scale"):
        given["llama_4_scaling_beta"] = own["attention.temperature_scale"]
    known: dict[str, Any] = found.get("rope_scaling", {})
    return {"rope_scaling": (given if kind == "yarn" else {}) | known | {"rope_type": kind, "factor": factor}}


def _longrope(own: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """Phi-3's factors of each frequency, for texts up to its first context length and for longer ones."""
    if any(file.tensors[name].type.name != "F32" for name in LONG_ROPE):
        raise CheckpointError(f"{file.path}: {LONG_ROPE[0]} and {LONG_ROPE[1]} must be F32")
    short, long = (
        [shortest(one) for one in file.raw(name).flatten().view(torch.float32).numpy()] for name in LONG_ROPE
    )
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if "rope.scaling.attn_factor" in own:
        scaling["attention_factor"] = own["rope.scaling.attn_factor"]
    original = own.get("rope.scaling.original_context_length")
    return {"rope_scaling": scaling} | ({} if original is None else {"original_max_position_embeddings": original})


def _llama3(found: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """Llama 3's parameters, which must give the factors of the file."""
    tensor, theta = file.tensors[FREQUENCIES], found.get("rope_theta", 10_000.0)
    dim: Any = found.get("head_dim")
    fits = tensor.type.name == "F32" and type(dim) is int and tensor.shape == (dim // 2,)
    if fits and type(theta) is float and theta > 1:
        factors = file.raw(FREQUENCIES).flatten().view(torch.float32)
        factor = float(factors.max())
        llama3 = RopeConfig(theta=theta, dim=dim, scaling="llama3", factor=factor, original_positions=8192)
        plain = RopeConfig(theta=theta, dim=dim)
        if factor >= 1 and torch.allclose(frequencies(plain) / frequencies(llama3), factors, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor} | _LLAMA3
    raise CheckpointError(f"{file.path}: {FREQUENCIES} is not as Llama 3.1 scales rotary frequencies; no other is read")
