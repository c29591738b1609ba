"""How much memory `hasten quantize` takes at its peak, and how long, for a checkpoint of a named shape.

    python benchmarks/quantize_memory.py --shape llama-1.1b --output benchmarks/results/quantize-memory.json

Writes the shape with random weights in bfloat16 into a temporary folder, quantizes it with the command in a process of
its own for each scheme, loads the result in another, and reads each process's peak resident memory (VmHWM), in which
the pages of mapped files count. The peak of quantizing should pass the input checkpoint by little more than what the
largest layer takes, whatever the output's size; that of loading the output's size.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Both children take their baseline after importing torch, before importing anything else of ours.
QUANTIZE = """
import json, sys
import torch
from hasten.machine import peak_memory, process_memory
baseline = process_memory()
from hasten.cli.main import main
main(["quantize", *sys.argv[2:], "--json", sys.argv[1]])
print(json.dumps({"baseline_bytes": baseline, "peak_bytes": peak_memory()}))
"""
LOAD = """
import json, sys, time
import torch
from hasten.machine import peak_memory, process_memory
baseline = process_memory()
start = time.perf_counter()
import hasten
model = hasten.load(sys.argv[1])
print(json.dumps({"baseline_bytes": baseline, "peak_bytes": peak_memory(), "seconds": time.perf_counter() - start}))
"""

G128 = ("--scheme", "int4", "--group-size", "128")
SCHEMES = {
    "int8": ["--scheme", "int8"],
    "int4 g128 mse": [*G128],
    "int4 g128 minmax": [*G128, "--search", "minmax"],
    "int4 g32 mse": ["--scheme", "int4"],
    "int4 g128 mse asymmetric": [*G128, "--asymmetric"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeMemory:
    """Measure time, sizes, errors and peak memory of quantizing a checkpoint."""

    shape: str = "llama-1.1b"
    """A shape of `hasten bench`."""

    output: Path | None = None
    """Where to write the JSON; printed in any case."""

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="hasten-quantize-memory-") as name:
            folder = Path(name)
            checkpoint = folder / "checkpoint"
            size, largest = write_checkpoint(self.shape, checkpoint)
            rows = [self.row(label, options, checkpoint, folder / "out") for label, options in SCHEMES.items()]
        from hasten.machine import describe
        from hasten.machine.files import write_json

        for row in rows:
            row["checkpoint_bytes"], row["largest_layer_bytes"] = size, largest
            over = row["quantize"]["peak_bytes"] - row["quantize"]["baseline_bytes"] - size
            row["quantize"]["over_checkpoint_bytes"] = over
            loaded = row["load"]["peak_bytes"] - row["load"]["baseline_bytes"]
            row["load"]["ratio"] = round(loaded / row["bytes"], 4)
        result = {"schema": 1, "machine": describe().to_json(), "shape": self.shape, "dtype": "bfloat16", "rows": rows}
        write_json("-", result)
        write_json(self.output, result)

    def row(self, label: str, options: list[str], checkpoint: Path, out: Path) -> dict[str, Any]:
        """Quantize and load again, each in a fresh process."""
        report = out.parent / "report.json"
        memory = child(QUANTIZE, str(report), str(checkpoint), *options, "--output", str(out))
        done = json.loads(report.read_text())
        errors = [layer["relative_error"] for layer in done["layers"] if layer["name"] != "head"]
        return {
            "name": label,
            "bytes": done["bytes"],
            "seconds": round(done["seconds"], 2),
            "relative_error": {"mean": sum(errors) / len(errors), "largest": max(errors)},
            "quantize": memory,
            "load": child(LOAD, str(out)),
        }


def child(code: str, *arguments: str) -> dict[str, Any]:
    """Run code in a process of its own; what its last line of output says."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{arguments} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def write_checkpoint(shape: str, folder: Path) -> tuple[int, int]:
    """Write the shape with random bfloat16 weights; the bytes of its files, and of its largest linear layer."""
    import torch

    from hasten.bench.models import BenchmarkModel
    from hasten.checkpoints.export import save

    model = BenchmarkModel(shape=shape).build(dtype=torch.bfloat16, device="cpu", seed=0)
    save(model, folder)
    linears = [m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")), max(linears)


if __name__ == "__main__":
    import tyro

    tyro.cli(QuantizeMemory).run()
