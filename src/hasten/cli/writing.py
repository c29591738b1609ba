"""Shared by commands that write a model: reading it without warnings about running it, and checking the output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer

WeightLayout = Literal["compressed-tensors", "gptq"]  # layouts of written quantized folders


def load_to_write(source: str | Path, dtype: str = "stored") -> Transformer:
    """Load a model that is only written again, without warnings about formats that have no kernel."""
    from hasten.checkpoints.load import load_quietly

    return load_quietly(source, dtype=dtype)


def require_new_folder(output: Path, source: Path, *, option: str, overwrite: bool) -> None:
    """Raise ConfigError, before any work, if the output is a file, or a folder whose files would be lost."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{option} {output} is a file; name a folder")
    if output.resolve() == source.resolve():
        raise ConfigError(f"{option} {output} is the model itself, which would be lost; name another folder")
    present = [name for name in ("config.json", "model.safetensors") if (output / name).exists()]
    if present and not overwrite:
        raise ConfigError(f"{option} {output} holds a model already ({present[0]}); --overwrite replaces it")
