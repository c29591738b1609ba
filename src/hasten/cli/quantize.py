"""`hasten quantize MODEL --output DIR`: a model in int8 or int4, as a folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hasten.cli.options import same_fields
from hasten.errors import ConfigError
from hasten.machine import configure, peak_memory
from hasten.machine.files import require_writable, write_json
from hasten.machine.progress import counter
from hasten.machine.threads import Threads

if TYPE_CHECKING:
    from hasten.quantization import LayerReport, Scheme


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Round a model's weights to int8 or int4, and write them as a folder that hasten and transformers load.

    Layer by layer, from file to file: memory for about one layer is needed beside the mapped input. transformers reads
    the folder with the package compressed-tensors (docs/quantization.md says of which models).
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, or a hub id (owner/name)."""
    output: Path
    """The folder to write; another than the model's own."""
    scheme: Literal["int8", "int4"]
    """int8: one scale for each output row. int4: one for each group of input features of a row."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a model that stands in the output folder already."""
    group_size: Literal[32, 64, 128] | None = None
    """Input features that share a scale (int4; 128 by default): smaller is more exact and takes more bytes."""
    symmetric: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """No zero points (the default; int8 is always symmetric)."""
    asymmetric: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A zero point for each group (int4)."""
    lm_head: Literal["int8", "same", "none"] = "int8"
    """The output matrix: in int8, like the other layers, or left as it is."""
    search: Literal["mse", "minmax"] | None = None
    """How an int4 scale is found: least squared error (the default), or the range of the group."""
    activations: Literal["int8", "float"] = "int8"
    """Whether hasten's products round activations to int8 too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of everything that is not quantized; auto keeps the model's own."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    json: str | None = None
    """Write sizes, seconds and the error of each layer as JSON to this file; "-": to standard output."""

    def scheme_of(self) -> Scheme:
        """The library's scheme. Raises ConfigError for options that contradict each other."""
        from hasten.quantization import Int4, Int8

        if self.symmetric and self.asymmetric:
            raise ConfigError("give one of --symmetric and --asymmetric")
        if self.scheme == "int8":
            if self.asymmetric:
                raise ConfigError("int8 is symmetric; --asymmetric goes with --scheme int4")
            for option, value in (("--group-size", self.group_size), ("--search", self.search)):
                if value is not None:
                    raise ConfigError(f"int8 has one scale for each row; {option} goes with --scheme int4")
            return Int8(**same_fields(self, Int8))
        return Int4(**same_fields(self, Int4) | {"symmetric": not self.asymmetric})

    def check_output(self, source: Path) -> None:
        """Raise ConfigError, before any work, for an output folder whose files would be lost, or that is a file."""
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"--output {self.output} is a file; name a folder")
        if self.output.resolve() == source.resolve():
            raise ConfigError(f"--output {self.output} is the model itself, which would be lost; name another folder")
        stands = [name for name in ("config.json", "model.safetensors") if (self.output / name).exists()]
        if stands and not self.overwrite:
            raise ConfigError(f"--output {self.output} holds a model already ({stands[0]}); --overwrite replaces it")

    def run(self) -> None:
        from time import perf_counter

        from hasten.model.load import load, resolve_folder
        from hasten.quantization import quantize_to_folder
        from hasten.quantization.schemes import layer_formats

        require_writable(self.json)
        scheme = self.scheme_of()
        configure(threads=self.threads)
        start = perf_counter()
        folder = resolve_folder(self.model)
        self.check_output(folder)
        model = load(folder, dtype=None if self.dtype == "auto" else self.dtype)
        reports: list[LayerReport] = []
        with counter("quantized layers", len(layer_formats(model, scheme))) as advance:

            def note(report: LayerReport) -> None:
                reports.append(report)
                advance(1)

            quantize_to_folder(model, scheme, self.output, report=note)
        result = {
            "output": str(self.output),
            "scheme": {"name": self.scheme} | asdict(scheme),
            "bytes_before": sum(parameter.nbytes for parameter in model.parameters()),
            "bytes": sum(path.stat().st_size for path in self.output.glob("model*.safetensors")),
            "seconds": perf_counter() - start,
            "peak_memory_bytes": peak_memory(),
            "layers": [_row(report) for report in reports],
        }
        write_json(self.json, result)
        if self.json != "-":
            print("\n".join(_summary(result, reports)))


def _row(report: LayerReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "bits": report.format.weight.bits,
        "group_size": report.format.weight.group_size,
        "relative_error": report.relative_error,
        "bytes_before": report.bytes_before,
        "bytes": report.bytes_after,
    }


def _summary(result: dict[str, Any], reports: list[LayerReport]) -> list[str]:
    """The errors by kind of layer (layers that differ only in their numbers together), then sizes and time."""
    kinds: dict[str, list[LayerReport]] = {}
    for report in reports:
        kind = ".".join(part for part in report.name.split(".")[1:] if not part.isdigit()) or report.name
        kinds.setdefault(kind, []).append(report)
    lines = [f"{'layers':<24} {'bits':>4} {'count':>6}   relative error: mean   largest"]
    for kind, found in kinds.items():
        errors = [report.relative_error for report in found]
        mean, most = sum(errors) / len(errors), max(errors)
        lines.append(f"{kind:<24} {found[0].format.weight.bits:>4} {len(found):>6} {mean:>22.4%} {most:>9.4%}")
    before, after = result["bytes_before"], result["bytes"]
    lines.append(
        f"{result['output']}: {before / 1e9:.3f} GB -> {after / 1e9:.3f} GB in {result['seconds']:.1f} s, "
        f"peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    return lines
