"""`hasten export MODEL OUTPUT`: write a model as a Hugging Face folder or a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hasten.cli.options import JsonOption
from hasten.cli.writing import load_to_write
from hasten.effects import Holds
from hasten.errors import ConfigError
from hasten.machine import resolve_dtype


@dataclass(frozen=True, kw_only=True)
class Export(JsonOption):
    """Write a model as a Hugging Face folder that transformers loads, converted to another dtype if asked.

    An OUTPUT that ends in .gguf becomes a file that llama.cpp loads. Quantized layers keep their numbers there: int4,
    int8, and the blocks of a GGUF file.

    Vocabulary padding is removed, weights are checked for NaN, and tensors are written in the layout that the model's
    family publishes.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, a GGUF file, or a hub id (owner/name)."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to write, which may be the model's own, or a file that ends in .gguf."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Holds("writes_folder", "in a GGUF file; say the type of its matrices by --gguf"),
    ] = "auto"
    """The dtype of the weights; auto keeps the model's own."""

    dequantize: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write quantized layers as plain weights: a folder that every program reads, and that can be quantized or trained.
    With --dtype float32 each number is exact."""

    gguf: Annotated[
        Literal["BF16", "F16", "Q8_0", "Q4_0"] | None,
        Holds("writes_file", "in a folder; name an OUTPUT that ends in .gguf"),
    ] = None
    """The type of the plain matrices in a GGUF file, by default F16 of those in float16 and BF16 of others."""

    @property
    def writes_file(self) -> bool:
        """Whether OUTPUT is a GGUF file."""
        return self.output.suffix == ".gguf"

    @property
    def writes_folder(self) -> bool:
        """Whether OUTPUT is a folder."""
        return not self.writes_file

    def run(self) -> None:
        from rich.console import Console

        from hasten.checkpoints.advice import export_plain, plain_folder
        from hasten.checkpoints.export import export_model
        from hasten.checkpoints.load import load_as_stored

        is_file = self.writes_file
        if self.dequantize and is_file:
            raise ConfigError(
                f"--dequantize writes a folder: {export_plain(self.model)}, then hasten export "
                f"{plain_folder(self.model)} {self.output}"
            )
        console = Console(stderr=True)
        with console.status(f"reading {self.model}"):
            if is_file:
                model = load_as_stored(self.model)
            else:
                # Plain weights are converted as they are written; dequantized ones are computed in the dtype.
                model = load_to_write(self.model, self.dtype if self.dequantize and self.dtype != "auto" else "stored")
        dtype = resolve_dtype(self.dtype, auto=model.dtype)
        with console.status(f"writing {self.output}"):
            if is_file:
                from hasten.checkpoints.gguf.write import has_plain_matrices, write_gguf

                if self.gguf is not None and not has_plain_matrices(model):
                    raise ConfigError(
                        f"--gguf {self.gguf} has no effect: all matrices of {self.model} are quantized, and are "
                        f"written as they are. Leave it out, or take {export_plain(self.model)}, then hasten export "
                        f"{plain_folder(self.model)} {self.output} --gguf {self.gguf}"
                    )
                name = write_gguf(model, self.output, self.gguf)
            else:
                export_model(model, self.output, dtype=dtype, dequantize=self.dequantize)
                name = str(dtype).removeprefix("torch.")
        files = [self.output] if is_file else sorted(self.output.glob("model*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        done = {"output": str(self.output), "family": model.config.family, "dtype": name, "bytes": size}
        if self.write(done | {"files": [path.name for path in files]}):
            print(f"{self.output}: {model.config.family}, {name}, {size / 1e9:.3f} GB in {len(files)} file(s)")
