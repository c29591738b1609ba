"""How long calibrated quantization takes on this machine for a named shape, and its memory, beside what was predicted.

    python benchmarks/quantize_time.py --output benchmarks/results/quantize-time.json

Writes the shape with random weights in bfloat16 and a tokenizer of the standard library into a folder, and runs
`hasten quantize` there for each method.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = ("--calibration", "stdlib")
METHODS = {
    "gptq": ["--scheme", "int4", "--method", "gptq", *TEXT],
    "gptaq": ["--scheme", "int3", "--group-size", "128", "--method", "gptq", "--gptaq", *TEXT],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeTime:
    """Measure."""

    shape: str = "llama-1.1b"
    """A shape of `hasten bench`."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods; rows of others that the output has stay."""

    samples: int = 64
    """Calibration samples, of 512 tokens of the standard library."""

    device: str = "cpu"
    """Where it is computed."""

    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        rows = [] if self.output is None or not self.output.exists() else json.loads(self.output.read_text())["rows"]
        rows = [row for row in rows if row["method"] not in self.methods]
        with tempfile.TemporaryDirectory(prefix="hasten-quantize-time-") as name:
            checkpoint = Path(name) / "checkpoint"
            write_checkpoint(self.shape, checkpoint)
            for method in self.methods:
                options = [*METHODS[method], "--samples", str(self.samples), "--length", "512"]
                command = [sys.executable, "-m", "hasten", "quantize", str(checkpoint), *options]
                command += ["--device", self.device, "--output", str(Path(name) / method)]
                rows.append({"method": method, "options": options} | measured(command))
                print(rows[-1], flush=True)
        if self.output is not None:
            settings = {"shape": self.shape, "device": self.device}
            write_json(self.output, {"schema": 1, "machine": describe().to_json(), **settings, "rows": rows})


def write_checkpoint(shape: str, folder: Path) -> None:
    """The shape with random bfloat16 weights, and byte pairs learnt from the standard library."""
    import torch

    from hasten.bench.models import BenchmarkModel
    from hasten.checkpoints.export import save
    from hasten.data import read_documents, train_bpe

    model: Any = BenchmarkModel(shape=shape).build(dtype=torch.bfloat16, device="cpu", seed=0)
    model.tokenizer = train_bpe(read_documents("stdlib", limit_bytes=2_000_000), vocab_size=4096)
    save(model, folder)


def measured(command: list[str]) -> dict[str, Any]:
    """What the command reports."""
    done = subprocess.run([*command, "--json", "-"], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    return {key: found[key] for key in ("seconds", "peak_memory_bytes", "predicted_memory_bytes", "bits_per_weight")}


if __name__ == "__main__":
    import tyro

    tyro.cli(QuantizeTime).run()
