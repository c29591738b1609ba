"""`hasten merge MODEL ADAPTER OUTPUT`: add an adapter to its model's weights, and write a folder or GGUF file."""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import tyro

from hasten.cli.options import JsonOption
from hasten.cli.quantize_gguf import folder_to_gguf, place_of_gguf
from hasten.cli.writing import require_new_folder
from hasten.effects import Needs
from hasten.errors import ConfigError
from hasten.machine import resolve_dtype


@dataclass(frozen=True, kw_only=True)
class Merge(JsonOption):
    """Add a LoRA adapter to its model's weights, and write the result as a model folder or GGUF file.

    Plain weights are computed in float64 and rounded once. Layers in int8 or int4 are rounded again; the cost is
    printed, with --text also in perplexity. A GGUF file with other types, such as Q4_K, becomes plain weights. `hasten
    serve --adapter` needs no merging, and loses nothing.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The model that the adapter was trained on: a Hugging Face folder, a GGUF file, or a hub id."""
    adapter: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ADAPTER")]
    """A folder with adapter_config.json and adapter_model.safetensors."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to write, or a file that ends in .gguf; another than the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the weights that are not quantized; auto keeps the model's own."""
    text: str | None = None
    """Measure the perplexity of this text before and after: a file, a folder or a glob."""
    limit_bytes: Annotated[int | None, Needs("text")] = 200_000
    """Read about N bytes of the text."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a model that the output folder already holds."""

    def run(self) -> None:
        from hasten.checkpoints.adapter_files import adapter_config, load_adapter
        from hasten.checkpoints.load import load, load_quietly, resolve_model
        from hasten.data import read_documents
        from hasten.model.lora import attach
        from hasten.quantization.merge import merge

        source = resolve_model(self.model)
        is_file, folder = self.output.suffix == ".gguf", self.output
        if is_file:
            folder = place_of_gguf(
                folder,
                source,
                overwrite=self.overwrite,
                others={"--json": self.json},
                dtype=self.dtype,
                option="OUTPUT",
            )
        require_new_folder(folder, source, option="OUTPUT", overwrite=self.overwrite)
        if self.output.resolve() == self.adapter.resolve():
            raise ConfigError(f"OUTPUT {self.output} is the adapter itself; name another folder")
        adapter_config(self.adapter)  # before the model is loaded
        model = load_quietly(source, dtype="stored")
        adapter = load_adapter(self.adapter, model)
        documents = [] if self.text is None else list(read_documents(self.text, limit_bytes=self.limit_bytes))
        rounded = merge(model, adapter, folder, dtype=resolve_dtype(self.dtype, auto=model.dtype))
        if is_file:
            folder_to_gguf(folder, self.output)
        done: dict[str, Any] = {"output": str(self.output), "layers": len(adapter)}
        done["rounded"] = [asdict(r) for r in rounded]
        lines = [f"{self.output}: {len(adapter)} layers merged"]
        if rounded:
            lost, error = median(r.lost for r in rounded), median(r.relative_error for r in rounded)
            lines.append(
                f"{len(rounded)} of them rounded again: an error of {error:.1%} of the weight, {lost:.0%} of what the "
                "adapter adds (medians)"
            )
        if documents:
            from hasten.evaluation.perplexity import perplexity

            attach(model, [adapter])
            done["perplexity"] = perplexity(model, documents).perplexity
            done["merged_perplexity"] = perplexity(load(self.output, dtype="stored"), documents).perplexity
            before, after = done["perplexity"], done["merged_perplexity"]
            lines.append(f"perplexity {before:.4f} with the adapter, {after:.4f} merged ({after / before - 1:+.2%})")
        if self.write(done):
            print("\n".join(lines))
