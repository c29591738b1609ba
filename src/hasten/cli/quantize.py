"""`hasten quantize MODEL --output DIR`: write a model in fewer bits, as a folder or a GGUF file."""

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
from hasten.cli.quantize_report import bits_per_weight, plain_embedding, row, summary
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
    from hasten.quantization import GPTQ, LayerReport, Scheme


BY_GPTQ = Needs("method", "gptq")
BY_SCHEME = Holds("scheme", "without --scheme (--formats has it for each layer); give --scheme instead")
IN_GROUPS = Unless("scheme", "int8")
SELF = "self"  # the calibration text that the model writes


@dataclass(frozen=True, kw_only=True)
class Quantize(JsonOption):
    """Quantize a model's weights to 8, 4, 3 or 2 bits, and write them as a folder that hasten and transformers load,
    or as a GGUF file that llama.cpp loads.

    Works layer by layer, from file to file, with memory for about one layer beside the mapped input. --method gptq
    works block by block; after an interruption the same command continues at its block. transformers reads the folder
    with the package compressed-tensors (docs/in-depth/formats.md lists the families).
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, a GGUF file, or a hub id (owner/name)."""
    output: Path
    """The folder to write, not the model's own; with --format gguf a file that ends in .gguf."""
    scheme: Literal["int8", "int4", "int3", "int2"] | None = None
    """int8 has one scale for each output row, the others one for each group of input features of a row."""
    formats: Path | None = None
    """Instead of a scheme, a JSON file with the format of each layer: {"blocks.0.attention.q": "int4-g32", ...}."""
    method: Literal["rtn", "gptq"] = "rtn"
    """rtn rounds to nearest, gptq uses calibration text and compensates each rounding in the weights that follow."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a model that the output folder already holds."""
    group_size: Annotated[Literal[32, 64, 128, 0] | None, BY_SCHEME, IN_GROUPS] = None
    """Input features with one scale (default 32; 0: a whole row); smaller groups are more exact and take more bytes."""
    symmetric: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_SCHEME] = False
    """No zero points (the default; int8 is always symmetric)."""
    asymmetric: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_SCHEME, IN_GROUPS] = False
    """A zero point for each group."""
    format: WeightLayout | Literal["gguf"] = "compressed-tensors"
    """The layout of the folder. gptq holds one bit width, and scales in float16. gguf is a file of int8 (Q8_0) or
    symmetric int4 (Q4_0) instead."""
    lm_head: Annotated[Literal["int8", "same", "none"] | None, BY_SCHEME] = None
    """The output matrix: in int8 (the default; with --scheme int8 in groups if it is tied to the embedding), like the
    other layers, or not quantized (the default of --format gptq, and if it is tied to the embedding, whose quantized
    form only hasten reads)."""
    embedding: Annotated[Literal["int8", "same", "none"] | None, BY_SCHEME] = None
    """The input matrix, not quantized by default. If it is tied to the lm_head, --lm-head decides."""
    search: Annotated[Literal["mse", "minmax"] | None, IN_GROUPS] = None
    """How a group's scale is chosen: by the least squared error (the default), or by the range of the group."""
    activations: Literal["auto", "int8", "float"] = "auto"
    """Whether products round activations to int8 too; calibration takes it into account. auto: int8 for weights in
    groups; float (16 bits) for weights with one scale a row, such as int8 and an int8 lm_head."""
    calibration: Annotated[str | None, BY_GPTQ] = None
    """gptq: calibration text: self (the default), which the model writes first (this takes its memory, and up to twice
    the time), or a file, a folder, a glob or stdlib as for eval --text."""
    samples: Annotated[int | None, BY_GPTQ] = None
    """gptq: calibration samples (default 128)."""
    length: Annotated[int | None, BY_GPTQ] = None
    """gptq: tokens of a sample (default 512)."""
    calibration_seed: Annotated[int | None, BY_GPTQ] = None
    """gptq: seed of the samples (default 0)."""
    spill: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_GPTQ] = False
    """gptq: keep the states of the samples in files beside the output instead of in memory."""
    order: Annotated[Literal["columns", "activation", "groups"] | None, BY_GPTQ] = None
    """gptq: round columns as stored, largest inputs first, or groups with the largest inputs first (the default)."""
    damping: Annotated[float | None, BY_GPTQ] = None
    """gptq: added to the diagonal of the inputs' products, as a share of its mean (default 0.01)."""
    gptaq: Annotated[bool, tyro.conf.FlagCreatePairsOff, BY_GPTQ] = False
    """gptq: aim at the outputs of the original model (GPTAQ); takes twice the memory for samples."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of everything that is not quantized; auto keeps the model's own."""
    device: str = "cpu"
    """Where one block at a time is computed; cuda calibrates faster."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    picture: Annotated[Path | None, BY_GPTQ] = None
    """gptq: draw the error of each layer's outputs, by rtn and by gptq, as a PNG."""

    def scheme_of(self) -> Scheme:
        """The scheme of these options. Raises ConfigError if they contradict each other."""
        from hasten.machine.regular_files import read_json
        from hasten.quantization.schemes import SCHEMES, Int8, Mixed

        if self.scheme is None:
            if self.format == "gguf":
                raise ConfigError("--format gguf goes with --scheme int8 or int4")
            if self.formats is not None and not self.formats.exists():
                raise ConfigError(
                    f"--formats {self.formats} does not exist; docs/in-depth/quantization.md shows how to write one"
                )
            if self.formats is not None:
                return Mixed(table=read_json(self.formats), **same_fields(self, Mixed))
            raise ConfigError("no format is given: give --scheme int8, int4, int3 or int2, or --formats FILE")
        if self.formats is not None:
            raise ConfigError("--scheme is one format for all layers, --formats one for each: leave out one of them")
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
        """The scheme with the defaults for this model; unusual ones are printed to standard error."""
        if self.format == "gguf" or model.quantization:
            return scheme
        head = self.lm_head is None and self.embedding is None
        scheme, notes = for_others(scheme, model, head=head)
        print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
        return scheme

    def method_of(self) -> GPTQ | None:
        """The method of these options; None rounds to nearest."""
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

        from hasten.checkpoints.load import resolve_model
        from hasten.planning.memory import PROCESS_BYTES

        require_writable(None if self.picture is None else str(self.picture))
        scheme, method = self.scheme_of(), self.method_of()
        configure(threads=self.threads)
        start = perf_counter()
        source = resolve_model(self.model)
        folder = self.folder_to_write(source)
        device = resolve_device(self.device)
        process = max(process_memory(), PROCESS_BYTES)  # libraries take memory once they are used
        model = load_to_write(source, "stored" if self.dtype == "auto" else self.dtype)
        before = sum(parameter.nbytes for parameter in model.parameters())
        scheme = self.fitted(scheme, model)
        self.check(model, scheme, method)
        result: dict[str, Any] = {
            "machine": describe().to_json(),
            "output": str(self.output),
            "scheme": {"name": self.scheme or "mixed"} | asdict(scheme),
            "method": {"name": self.method} | ({} if method is None else asdict(method)),
        }
        calibration = None
        if method is not None:
            calibration, written = self.calibration_of(model, folder)
            held = process + before if device == model.device else 0  # else only blocks are on the device
            result |= self.announce(model, scheme, method, calibration, held, device)
            if written and held:  # the model that wrote the text mapped the checkpoint a second time
                written += held + before
            result["predicted_memory_bytes"] = max(result["predicted_memory_bytes"], written)
        reports = self.quantize(model, scheme, method, calibration, folder, device)
        files, bits = list(folder.glob("model*.safetensors")), bits_per_weight(model, reports)
        if self.format == "gguf":
            files, bits = [self.output], folder_to_gguf(folder, self.output)
        result |= {
            "bytes_before": before,
            "bytes": sum(path.stat().st_size for path in files),
            "bits_per_weight": bits,
            "seconds": perf_counter() - start,
            "peak_memory_bytes": peak_memory(device),
            "layers": [row(report) for report in reports],
        }
        if self.write(result):
            own = self.scheme is not None and self.format == "compressed-tensors"
            about = plain_embedding(model, reports, result["bytes"]) if own else []
            print("\n".join([*summary(result, reports), *about]))
        if self.picture is not None:
            from hasten.quantization.report import draw_errors

            draw_errors(reports, self.method, self.picture)

    def folder_to_write(self, source: Path) -> Path:
        """The folder to quantize into, which --format gguf turns into the file. Raises ConfigError if it is in use."""
        folder = self.output
        if self.format == "gguf":
            others = {"--json": self.json, "--picture": self.picture}
            folder = place_of_gguf(folder, source, overwrite=self.overwrite, others=others, dtype=self.dtype)
        elif folder.suffix == ".gguf":
            raise ConfigError(f"--output {folder} looks like a file, which --format gguf writes; name a folder without")
        require_new_folder(folder, source, option="--output", overwrite=self.overwrite)
        return folder

    @property
    def layout(self) -> WeightLayout:
        """The layout of the folder; a GGUF file is made of a folder in compressed-tensors' layout."""
        return "compressed-tensors" if self.format == "gguf" else self.format

    def check(self, model: Transformer, scheme: Scheme, method: GPTQ | None) -> None:
        """Raise ConfigError if the model cannot be written as asked, before calibration text takes minutes."""
        from hasten.checkpoints.export import check_layers
        from hasten.quantization.quantize import check_quantizable

        if self.format == "gguf":
            from hasten.checkpoints.gguf.write import check_gguf

            check_gguf(model, scheme.layers(model), self.output)
        if method is not None:
            with warnings.catch_warnings(action="ignore"):  # `quantize_to_folder` gives them
                check_layers(model, check_quantizable(model, scheme, method), self.layout)

    def announce(
        self,
        model: Transformer,
        scheme: Scheme,
        method: GPTQ,
        calibration: Tensor,
        held: int,
        device: torch.device,
    ) -> dict[str, Any]:
        """Print the calibration samples and the predicted memory; returns the same for the JSON.

        held: bytes of the process and the checkpoint; 0 if only blocks are on the device.
        """
        from hasten.model.layer_format import activation_group
        from hasten.quantization.cost import predicted_bytes

        samples, length = calibration.shape
        beside = predicted_bytes(model, calibration, method, device=device, spill=self.spill)
        layers = scheme.layers(model).values()
        rounding = sum(bool(activation_group(layer, 1)) for layer in layers)
        activations = "rounded to int8 as in the products that serve it" if rounding else "not rounded"
        if 0 < rounding < len(layers):
            activations += f" (in {rounding} of {len(layers)} layers)"
        place = f" on {device}, the samples in the host's"
        if held:
            place = f", {beside / 1e9:.2f} of it beside the checkpoint"
        print(
            f"{samples} calibration samples of {length} tokens, activations {activations}; memory: "
            f"{(held + beside) / 1e9:.2f} GB{place}",
            file=sys.stderr,
        )
        source = {"text": self.calibration or SELF, "seed": self.calibration_seed or 0}
        return {
            "calibration": source | {"samples": samples, "length": length},
            "predicted_memory_bytes": held + beside,
        }

    def quantize(
        self,
        model: Transformer,
        scheme: Scheme,
        method: GPTQ | None,
        calibration: Tensor | None,
        folder: Path,
        device: torch.device,
    ) -> list[LayerReport]:
        """Write the quantized folder, with a progress bar; returns a report of each layer."""
        from hasten.quantization import quantize_to_folder

        reports: list[LayerReport] = []
        total = len(scheme.layers(model))
        with share("quantized layers") as progress, warnings.catch_warnings():
            if self.format == "gguf":  # about the folder, which is not kept
                warnings.filterwarnings("ignore", "hasten reads this quantized model", HastenWarning)

            def note(report: LayerReport) -> None:
                reports.append(report)
                progress(len(reports), total)

            quantize_to_folder(
                model,
                scheme,
                folder,
                method=method,
                calibration=calibration,
                report=note,
                spill=self.spill,
                format=self.layout,
                device=device,
            )
        return reports
