"""`hasten convert MODEL OUTPUT --format …`: write a quantized checkpoint in another layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hasten.cli.options import JsonOption
from hasten.cli.writing import WeightLayout, require_new_folder


@dataclass(frozen=True, kw_only=True)
class Convert(JsonOption):
    """Write a quantized checkpoint (GPTQ, AWQ, compressed-tensors) in another layout, every number as it is.

    Integers, scales and zero points are copied, never rounded. A layout that cannot hold them exactly is refused, and
    nothing is written.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, or a hub id (owner/name), with quantized weights."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to write; another than the model's own."""

    format: WeightLayout = "compressed-tensors"
    """The layout to write."""

    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a model that the output folder holds already."""

    def run(self) -> None:
        from hasten.checkpoints.convert import convert
        from hasten.checkpoints.load import resolve_model

        source = resolve_model(self.model)
        require_new_folder(self.output, source, option="OUTPUT", overwrite=self.overwrite)
        model = convert(source, self.output, format=self.format)
        size = sum(path.stat().st_size for path in self.output.glob("model*.safetensors"))
        done = {"output": str(self.output), "family": model.config.family, "format": self.format, "bytes": size}
        if self.write(done):
            print(f"{self.output}: {model.config.family}, {self.format}, {size / 1e9:.3f} GB")
