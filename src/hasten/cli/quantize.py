"""`hasten quantize MODEL --output DIR`: a model in fewer bits, as a folder."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hasten.cli.options import JsonOption, same_fields
from hasten.cli.quantize_defaults import for_others
from hasten.cli.quantize_gguf import folder_to_gguf, place_of_gguf
from hasten.cli.writing import WeightLayout, load_to_write, require_new_folder
from hasten.effects import Holds, Needs, Unless
from hasten.errors import ConfigError, HastenWarning
from hasten.machine import configure, describe, peak_memory, process_memory, resolve_device
from hasten.machine.files import require_writable
from hasten.machine.progress import share
from hasten.machine.threads import Threads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hasten.model.transformer import Transformer
    from hasten.ops.linear.weights import WeightFormat
    from hasten.quantization import GPTQ, LayerReport, Scheme


BY_GPTQ = Needs("method", "gptq")
BY_SCHEME = Holds("scheme", "without --scheme (--formats says it by layer); give that in its place")
IN_GROUPS = Unless("scheme", "int8")
SELF = "self"  # the calibration text that the model writes


@dataclass(frozen=True, kw_only=True)
class Quantize(JsonOption):
    """Quantize a model's weights to 8, 4, 3 or 2 bits, and write them as a folder that hasten and transformers load,
    or as a GGUF file that llama.cpp loads.

    Layer by layer, from file to file: memory for about one layer is needed beside the mapped input; --method gptq works
    block by block, and goes on at its block after an interruption. transformers reads the folder with the package
    compressed-tensors (docs/quantization.md says of which models).
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, a GGUF file, or a hub id (owner/name)."""
    output: Path
    """The folder to write, another than the model's own; with --format gguf a file that ends in .gguf."""
    scheme: Literal["int8", "int4", "int3", "int2"] | None = None
    """int8: one scale for each output row. The others: one for each group of input features of a row."""
    formats: Path | None = None
    """Instead of a scheme, a JSON file with the format of each layer: {"blocks.0.attention.q": "int4-g32", ...}."""
    method: Literal["rtn", "gptq"] = "rtn"
    """rtn rounds to nearest. gptq looks at calibration text, and makes up for each rounding in the weights to come."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a model that the output folder holds already."""
    group_size: Annotated[Literal[32, 64, 128, 0] | None, BY_SCHEME, IN_GROUPS] = None
    """Input features that share a scale (32 by default; 0: a whole row): fewer are more exact and take more bytes."""
    symmetric: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_SCHEME] = False
    """No zero points (the default; int8 is always symmetric)."""
    asymmetric: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_SCHEME, IN_GROUPS] = False
    """A zero point for each group."""
    format: WeightLayout | Literal["gguf"] = "compressed-tensors"
    """The layout of the folder. gptq holds one bit width, and scales in float16. gguf is a file instead, of int8 (Q8_0)
    or symmetric int4 (Q4_0)."""
    lm_head: Annotated[Literal["int8", "same", "none"] | None, BY_SCHEME] = None
    """The output matrix: in int8 (the default; with --scheme int8 in groups where it is the embedding too), like the
    other layers, or left as it is (the default of gptq, and where it is tied to the embedding, whose quantized form
    hasten alone reads)."""
    embedding: Annotated[Literal["int8", "same", "none"] | None, BY_SCHEME] = None
    """The input matrix, left as it is by default. Tied to the lm_head they stay one matrix, and --lm-head decides."""
    search: Annotated[Literal["mse", "minmax"] | None, IN_GROUPS] = None
    """How a group's scale is found: least squared error (the default), or the range of the group."""
    activations: Literal["auto", "int8", "float"] = "auto"
    """Whether hasten's products round activations to int8 too; calibration takes it into account. auto: int8 for
    weights in groups; float (16 bits) for weights with one scale a row, as int8 and an int8 lm_head."""
    calibration: Annotated[str | None, BY_GPTQ] = None
    """gptq: calibration text: self (the default), which the model writes first (this takes its memory, and up to as
    long again), or a file, a folder, a glob or stdlib as for eval --text."""
    samples: Annotated[int | None, BY_GPTQ] = None
    """gptq: calibration samples (128 by default)."""
    length: Annotated[int | None, BY_GPTQ] = None
    """gptq: tokens of a sample (512 by default)."""
    calibration_seed: Annotated[int | None, BY_GPTQ] = None
    """gptq: which samples are drawn from the text (0 by default)."""
    spill: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_GPTQ] = False
    """gptq: hold the samples on their way through the model in files beside the output instead of in memory."""
    order: Annotated[Literal["columns", "activation", "groups"] | None, BY_GPTQ] = None
    """gptq: columns as they stand; those with the largest inputs first; or whole groups so (the default)."""
    damping: Annotated[float | None, BY_GPTQ] = None
    """gptq: added to the diagonal of the inputs' products, as a share of its mean (0.01 by default)."""
    gptaq: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_GPTQ] = False
    """gptq: aim at the outputs of the model before quantization (GPTAQ); takes the samples' memory twice."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of everything that is not quantized; auto keeps the model's own."""
    device: str = "cpu"
    """Where it is computed, one block in memory at a time; cuda calibrates faster."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    picture: Annotated[Path | None, BY_GPTQ] = None
    """gptq: draw the error of each layer's outputs, of rtn and of gptq, as a PNG."""

    def scheme_of(self) -> Scheme:
        """The library's scheme. Raises ConfigError for options that contradict each other."""
        from hasten.machine.regular_files import read_json
        from hasten.quantization.schemes import SCHEMES, Int8, Mixed

        if self.scheme is None:
            if self.format == "gguf":
                raise ConfigError("--format gguf goes with --scheme int8 or int4")
            if self.formats is not None and not self.formats.exists():
                raise ConfigError(f"--formats {self.formats} is not there; docs/quantization.md shows how to write one")
            if self.formats is not None:
                return Mixed(table=read_json(self.formats), **same_fields(self, Mixed))
            raise ConfigError("say how: --scheme int8, int4, int3 or int2, or --formats FILE")
        if self.formats is not None:
            raise ConfigError("--scheme is one format for all layers, and --formats takes its place: leave out one")
        if self.symmetric and self.asymmetric:
            raise ConfigError("give one of --symmetric and --asymmetric")
        if self.scheme == "int8":
            return Int8(**same_fields(self, Int8))
        kind = SCHEMES[self.scheme]
        own: dict[str, Any] = {} if self.format == "compressed-tensors" else {"scale_dtype": "float16"}
        if self.format == "gptq":
            own["lm_head"] = self.lm_head or "none"
        return kind(**same_fields(self, kind) | {"symmetric": not self.asymmetric} | own)

    def fitted(self, scheme: Scheme, model: Transformer) -> Scheme:
        """The scheme with the defaults for this model; a line on standard error says where they are unusual."""
        if self.format == "gguf" or model.quantization:
            return scheme
        head = self.lm_head is None and self.embedding is None
        scheme, notes = for_others(scheme, model, head=head)
        print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
        return scheme

    def method_of(self) -> GPTQ | None:
        """The library's method, with what was given of it."""
        from hasten.quantization import GPTQ

        return None if self.method == "rtn" else GPTQ(**same_fields(self, GPTQ))

    def calibration_of(self, model: Transformer, output: Path) -> tuple[Tensor, int]:
        """The calibration samples, and the bytes of memory that writing them took (0 if they were read).

        Raises ConfigError for a text that is too short, or a model without a tokenizer.
        """
        from hasten.cli.written_text import written_text
        from hasten.data import read_documents
        from hasten.quantization import calibration_tokens
        from hasten.quantization.calibration import check_calibration

        if model.tokenizer is None:
            raise ConfigError("calibration text needs a tokenizer, which this model's folder lacks")
        wanted = {
            "samples": 128 if self.samples is None else self.samples,
            "length": 512 if self.length is None else self.length,
            "seed": self.calibration_seed or 0,
        }
        if self.calibration in (None, SELF):
            return written_text(self, model, output, wanted)
        documents = read_documents(self.calibration)
        tokens = calibration_tokens(model.tokenizer, documents, **wanted)
        return check_calibration(tokens, model.config.vocab_size, model.config.max_positions), 0

    def run(self) -> None:
        from time import perf_counter

        from hasten.checkpoints.export import check_layers
        from hasten.checkpoints.load import resolve_model
        from hasten.planning.memory import PROCESS_BYTES
        from hasten.quantization import quantize_to_folder
        from hasten.quantization.quantize import check_quantizable

        require_writable(None if self.picture is None else str(self.picture))
        scheme, method = self.scheme_of(), self.method_of()
        configure(threads=self.threads)
        start = perf_counter()
        folder = resolve_model(self.model)
        output = self.output
        if self.format == "gguf":
            others = {"--json": self.json, "--picture": self.picture}
            output = place_of_gguf(output, folder, overwrite=self.overwrite, others=others, dtype=self.dtype)
        elif output.suffix == ".gguf":
            raise ConfigError(f"--output {output} looks like a file, which --format gguf writes; name a folder without")
        require_new_folder(output, folder, option="--output", overwrite=self.overwrite)
        device = resolve_device(self.device)
        base = max(process_memory(), PROCESS_BYTES)  # the libraries take memory once they are used
        model = load_to_write(folder, "stored" if self.dtype == "auto" else self.dtype)
        before = sum(parameter.nbytes for parameter in model.parameters())
        held = base + before if device == model.device else 0
        scheme = self.fitted(scheme, model)
        layers = scheme.layers(model)
        layout = "compressed-tensors" if self.format == "gguf" else self.format
        if self.format == "gguf":
            from hasten.checkpoints.gguf.write import check_gguf

            check_gguf(model, layers, self.output)
        if method is not None:  # writing calibration text takes minutes: refuse before it
            with warnings.catch_warnings(action="ignore"):  # `quantize_to_folder` gives them
                check_layers(model, check_quantizable(model, scheme, method), layout)
        calibration, written = (None, 0) if method is None else self.calibration_of(model, output)
        result: dict[str, Any] = {
            "machine": describe().to_json(),
            "output": str(self.output),
            "scheme": {"name": self.scheme or "mixed"} | asdict(scheme),
            "method": {"name": self.method} | ({} if method is None else asdict(method)),
        }
        if method is not None and calibration is not None:
            result |= self.announce(model, scheme, method, calibration, held, device)
            if written and held:  # it maps the checkpoint a second time
                written += held + before
            result["predicted_memory_bytes"] = max(result["predicted_memory_bytes"], written)
        reports: list[LayerReport] = []
        total = len(layers)
        with share("quantized layers") as progress:

            def note(report: LayerReport) -> None:
                reports.append(report)
                progress(len(reports), total)

            options: dict[str, Any] = {"method": method, "calibration": calibration, "report": note}
            with warnings.catch_warnings():
                if self.format == "gguf":  # of the folder, which nobody keeps
                    warnings.filterwarnings("ignore", "hasten reads this quantized model", HastenWarning)
                quantize_to_folder(model, scheme, output, spill=self.spill, format=layout, device=device, **options)
        files, bits = list(output.glob("model*.safetensors")), _bits_per_weight(model, reports)
        if self.format == "gguf":
            files, bits = [self.output], folder_to_gguf(output, self.output)
        result |= {
            "bytes_before": before,
            "bytes": sum(path.stat().st_size for path in files),
            "bits_per_weight": bits,
            "seconds": perf_counter() - start,
            "peak_memory_bytes": peak_memory(device),
            "layers": [_row(report) for report in reports],
        }
        if self.picture is not None:
            from hasten.quantization.report import draw_errors

            draw_errors(reports, self.method, self.picture)
        if self.write(result):
            print("\n".join(_summary(result, reports)))

    def announce(
        self,
        model: Transformer,
        scheme: Scheme,
        method: GPTQ,
        calibration: Tensor,
        held: int,
        device: torch.device,
    ) -> dict[str, Any]:
        """Say what will be looked at and what it takes; returns the same for the JSON. held: bytes of process and
        checkpoint, 0 where only blocks come to the device.
        """
        from hasten.model.layer_format import activation_group
        from hasten.quantization.cost import predicted_bytes

        samples, length = calibration.shape
        beside = predicted_bytes(model, calibration, method, device=device, spill=self.spill)
        served = [bool(activation_group(layer, 1)) for layer in scheme.layers(model).values()]
        rounded = "rounded to int8 as in the products that serve it" if any(served) else "not rounded"
        some = f" (in {sum(served)} of {len(served)} layers)" * (0 < sum(served) < len(served))
        place = (
            f", {beside / 1e9:.2f} of it beside the checkpoint" if held else f" on {device}, the samples in the host's"
        )
        line = (
            f"{samples} calibration samples of {length} tokens, activations {rounded}{some}; memory: "
            f"{(held + beside) / 1e9:.2f} GB{place}"
        )
        print(line, file=sys.stderr)
        source = {"text": self.calibration or SELF, "seed": self.calibration_seed or 0}
        return {
            "calibration": source | {"samples": samples, "length": length},
            "predicted_memory_bytes": held + beside,
        }


def _bits_per_weight(model: Transformer, reports: list[LayerReport]) -> float:
    """Of all that is stored, embeddings and norms included."""
    from hasten.quantization.report import stored_weights

    quantized = {f"{report.name}.weight": 8 * report.bytes_after for report in reports}
    weights = stored_weights(model)
    bits = sum(quantized.get(name, 8 * weight.nbytes) for name, weight in weights.items())
    return bits / sum(weight.numel() for weight in weights.values())


def _row(report: LayerReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "bits": report.format.weight.bits,
        "group_size": report.format.weight.group_size,
        "relative_error": report.relative_error,
        "bytes_before": report.bytes_before,
        "bytes": report.bytes_after,
        "output_error": report.output_error,
        "rtn_output_error": report.nearest_output_error,
        "note": report.note,
    }


def _summary(result: dict[str, Any], reports: list[LayerReport]) -> list[str]:
    """The errors by kind of layer (layers that differ only in their numbers together), then sizes and time."""
    kinds: dict[tuple[str, WeightFormat], list[LayerReport]] = {}
    for report in reports:
        kind = ".".join(part for part in report.name.split(".")[1:] if not part.isdigit()) or report.name
        kinds.setdefault((kind, report.format.weight), []).append(report)
    calibrated = any(report.output_error is not None for report in reports)
    outputs = "   output error: rtn   method" if calibrated else ""
    lines = [f"{'layers':<24} {'bits':>4} {'group':>6} {'count':>6}   relative error: mean   largest{outputs}"]
    for (kind, format), found in kinds.items():
        errors = [report.relative_error for report in found]
        mean, most = sum(errors) / len(errors), max(errors)
        line = f"{kind:<24} {format.bits:>4} {format.group_size or 'row':>6} {len(found):>6} {mean:>22.4%} {most:>9.4%}"
        pairs = [(r.nearest_output_error, r.output_error) for r in found if r.output_error is not None]
        if pairs:
            nearest, own = (sum(part or 0.0 for part in column) / len(pairs) for column in zip(*pairs, strict=True))
            line += f" {nearest:>19.4%} {own:>8.4%}"
        lines.append(line)
    lines += [f"{report.name}: {report.note}" for report in reports if report.note]
    if result["method"].get("gptaq"):
        lines.append(
            "gptaq aims at the outputs before quantization; its output error is of exact weights on its inputs"
        )
    before, after = result["bytes_before"], result["bytes"]
    predicted = result.get("predicted_memory_bytes")
    memory = f"peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB"
    if predicted is not None:
        memory += f" ({predicted / 1e9:.2f} predicted)"
    lines.append(
        f"{result['output']}: {before / 1e9:.3f} GB -> {after / 1e9:.3f} GB in {result['seconds']:.1f} s, "
        f"{result['bits_per_weight']:.2f} bits per weight, {memory}"
    )
    return lines
