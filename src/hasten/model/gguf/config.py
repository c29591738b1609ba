"""The config.json that a GGUF file's metadata come to."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hasten.errors import CheckpointError
from hasten.model.config import RopeConfig
from hasten.model.gguf.header import GGUFFile
from hasten.model.gguf.names import ARCHITECTURES, FIELDS, FREQUENCIES
from hasten.model.rope import frequencies

TIED = "output.weight"  # where it is missing, head and embedding are one


def config_values(file: GGUFFile) -> dict[str, Any]:
    """As a published config.json of the model would state it. Raises CheckpointError for what no family here has."""
    metadata, where = file.metadata, file.path
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: general.architecture is {architecture!r:.60}; GGUF files of {', '.join(ARCHITECTURES)} are read"
        )
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    for key in ("expert_count", "rope.scaling.attn_factor"):
        if own.get(key, 0) not in (0, 1):
            raise CheckpointError(
                f"{where}: {architecture}.{key} is {own[key]!r:.40}, which is not read from GGUF files"
            )
    found = {field: _single(own[key], key, file) for key, field in FIELDS.items() if key in own}
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if type(hidden) is int and type(heads) is int and heads:
        found = {"num_key_value_heads": heads, "head_dim": hidden // heads} | found
    dim = found.get("head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, dim) != dim:
            raise CheckpointError(
                f"{where}: {architecture}.{key} is {own[key]!r:.40} and a head has {dim!r:.40}; hasten reads equal ones"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{where} has no tensor token_embd.weight: it is not a whole model")
    found |= {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": TIED not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if architecture.startswith("gemma"):
        found |= _gemma(own, found, file)
    scaling = _scaling(own, found, file)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _single(value: Any, key: str, file: GGUFFile) -> Any:
    """A number, also where it stands once for each layer."""
    if not isinstance(value, np.ndarray):
        return value
    if len(value) and (value == value[0]).all():
        return value[0].item()
    raise CheckpointError(f"{file.path}: {key} differs from layer to layer, which hasten does not read")


def _gemma(own: Mapping[str, Any], found: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    layers, dim = found.get("num_hidden_layers"), found.get("head_dim")
    if "sliding_window" not in found:
        raise CheckpointError(f"{file.path}: it has no attention.sliding_window, which a gemma needs")
    # As llama.cpp decides it: the two models of 27 B divide by another number than the size of a head.
    wide = layers == {"gemma2": 46, "gemma3_text": 62}[found["model_type"]]
    values = {"query_pre_attn_scalar": found["hidden_size"] // found["num_attention_heads"] if wide else dim}
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        return values | {"layer_types": ["sliding_attention" if one else "full_attention" for one in pattern.tolist()]}
    return values | ({} if pattern is None else {"sliding_window_pattern": pattern})


def _scaling(own: Mapping[str, Any], found: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """`rope_scaling`: linear and yarn by metadata, Llama 3's by the factors of its frequencies."""
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    original = own.get("rope.scaling.original_context_length")
    if FREQUENCIES in file.tensors:
        return _of_factors(found, file)
    if kind == "yarn":
        betas = {
            name: own[f"rope.scaling.yarn_{name}"]
            for name in ("beta_fast", "beta_slow")
            if f"rope.scaling.yarn_{name}" in own
        }
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | betas
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{file.path}: rope.scaling.type is {kind!r:.40}; none, linear and yarn are read")
    return {} if factor in (None, 0, 1) else {"rope_type": "linear", "factor": factor}


def _of_factors(found: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """Llama 3's parameters where they give these factors, else the factors themselves."""
    tensor, dim, theta = file.tensors[FREQUENCIES], found.get("head_dim"), found.get("rope_theta", 10_000.0)
    if tensor.type.name != "F32" or tensor.shape != (dim // 2 if type(dim) is int else 0,):
        raise CheckpointError(f"{file.path}: {FREQUENCIES} must be {dim!r:.40} / 2 numbers of F32")
    factors = file.raw(FREQUENCIES).flatten().view(torch.float32)
    given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = float(factors.max())
    if type(theta) is float and theta > 1 and 1 < factor < 1e6:
        common = {"theta": theta, "dim": dim}
        plain = frequencies(RopeConfig(**common))
        llama3 = frequencies(RopeConfig(**common, scaling="llama3", factor=factor, original_positions=8192))
        if torch.allclose(plain / llama3, factors, rtol=1e-5):
            return {"rope_type": "llama3", "factor": factor} | given
    values = factors.tolist()
    return {"rope_type": "longrope", "factor": 1.0, "short_factor": values, "long_factor": values}
