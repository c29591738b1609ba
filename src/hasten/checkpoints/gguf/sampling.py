"""The sampling that a GGUF file recommends, `general.sampling.*`: what generation_config.json is to a folder."""

from collections.abc import Mapping
from typing import Any

from hasten.checkpoints.gguf.header import GGUFFile
from hasten.errors import CheckpointError

# Our names, which are those of generation_config.json, and the file's.
NAMES = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
NAMES |= {"repetition_penalty": "penalty_repeat"}


def recommended_sampling(file: GGUFFile) -> dict[str, Any]:
    """The values as generation_config.json has them; empty where the file recommends nothing."""
    found: dict[str, Any] = {}
    for ours, name in NAMES.items():
        key = f"general.sampling.{name}"
        value = file.metadata.get(key)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise CheckpointError(f"{file.path}: {key} is {value!r:.60}, and no number")
        if ours != "top_k" or value > 0:  # llama.cpp keeps all tokens with 0 and less
            found[ours] = value if type(value) is int else round(value, 6)  # of a float32
    return {"do_sample": True} | found if found else {}


def sampling_entries(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the values of a generation_config.json that samples."""
    given = {name: generation.get(ours) for ours, name in NAMES.items() if generation.get("do_sample")}
    return {
        f"general.sampling.{name}": int(value) if name == "top_k" else float(value)
        for name, value in given.items()
        if isinstance(value, int | float)
    }
