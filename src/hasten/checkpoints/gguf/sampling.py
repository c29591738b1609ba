"""The sampling that a GGUF file recommends, `general.sampling.*`: what generation_config.json is to a folder."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from hasten.checkpoints.gguf.header import GGUFFile
from hasten.errors import CheckpointError

# Our names, which are those of generation_config.json, and the file's.
NAMES = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
NAMES |= {"repetition_penalty": "penalty_repeat"}
MOST = {"temperature": 100.0, "top_k": float(1 << 31), "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 100.0}


def recommended_sampling(file: GGUFFile) -> dict[str, Any]:
    """The values as generation_config.json has them; empty where the file recommends nothing.

    Raises CheckpointError for what is no number, or none that can be meant.
    """
    found: dict[str, Any] = {}
    for ours, name in NAMES.items():
        key = f"general.sampling.{name}"
        value = file.metadata.get(key)
        if value is None:
            continue
        if not _is_number(value) or (value > MOST[ours] and ours != "top_p"):
            raise CheckpointError(f"{file.path}: {key} is {value!r:.60}, and no number up to {MOST[ours]:g}")
        if 0 < value <= MOST[ours]:
            found[ours] = int(value) if ours == "top_k" else value
        elif ours == "temperature":
            found[ours] = 0.0  # the others are off at 0 and below, and top_p above 1
    return {"do_sample": True} | found if found else {}


def sampling_entries(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the values of a generation_config.json that samples; without those that a file cannot hold."""
    given = {ours: generation.get(ours) for ours in NAMES if generation.get("do_sample")}
    return {
        f"general.sampling.{NAMES[ours]}": int(value) if ours == "top_k" else float(value)
        for ours, value in given.items()
        if _is_number(value) and 0 <= value <= MOST[ours]
    }


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) is int or (type(value) is float and math.isfinite(value))
