"""`hasten export MODEL OUTPUT`: a model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hasten.machine import resolve_dtype
from hasten.machine.files import require_writable, write_json


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model as a Hugging Face folder that transformers loads, converted to another dtype if asked.

    Vocabulary padding is taken off, weights are checked for NaN, and pieces of a checkpoint are brought into the
    layout that the model's family publishes.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, a GGUF file, or a hub id (owner/name)."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to write; it may be the model's own."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the weights; auto keeps the model's own."""

    json: str | None = None
    """Write what was done as JSON to this file; "-": to standard output."""

    def run(self) -> None:
        require_writable(self.json)
        from rich.console import Console

        from hasten.model.export import export_model
        from hasten.model.load import load

        console = Console(stderr=True)
        with console.status(f"reading {self.model}"):
            model = load(self.model)
        dtype = resolve_dtype(self.dtype, auto=model.dtype)
        with console.status(f"writing {self.output}"):
            export_model(model, self.output, dtype=dtype)
        files = sorted(self.output.glob("model*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        name = str(dtype).removeprefix("torch.")
        done = {"output": str(self.output), "family": model.config.family, "dtype": name, "bytes": size}
        write_json(self.json, done | {"files": [path.name for path in files]})
        if self.json != "-":
            print(f"{self.output}: {model.config.family}, {name}, {size / 1e9:.3f} GB in {len(files)} file(s)")
