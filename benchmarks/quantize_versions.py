"""How long rounding takes beside PyTorch's, and GPTQ beside another version of hasten.

    python benchmarks/quantize_versions.py rounding --output benchmarks/results/quantize-rounding.json
    git worktree add /tmp/before COMMIT
    python benchmarks/quantize_versions.py versions --before-source /tmp/before/src \\
        --output benchmarks/results/quantize-versions.json
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from speeds import ROOT, commit

from hasten.data.book import BOOK
from hasten.measure.script import Report, Script, Table, TimedScript, main, markdown
from hasten.ops.linear import int4_format
from hasten.quantization import GPTQ, gptq, rounding
from hasten.quantization.gptq import InputStatistics, Solver, output_error
from hasten.quantization.rounding import Grid, native_rounding, round_weight

VERSIONS = ("before", "now")
KEPT = ("kl_mean", "perplexity", "against_perplexity")
SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536))  # SmolLM2-135M's layers (N, K)


@dataclass(frozen=True, kw_only=True)
class Rounding(TimedScript):
    """Random weights of SmolLM2-135M's shapes, rounded natively and by PyTorch in turns.

    CPU seconds count too: other programs on the machine do not change them as much.
    """

    result = "quantize-rounding"
    rounds: int = 5

    def measure(self) -> Report:
        return {"rows": [row for shape in SHAPES for row in self.rows(*shape)]}

    def rows(self, n: int, k: int) -> list[Report]:
        """GPTQ and rounding to nearest of one shape, in int4 and groups of 32."""
        generator = torch.Generator().manual_seed(0)
        inputs, weight = InputStatistics(k), torch.randn(n, k, generator=generator)
        mixed = torch.randn(k, k, generator=generator) * 0.05 + torch.eye(k)
        inputs.add(torch.randn(2 * k, k, generator=generator) @ mixed)
        inputs.finish()
        solver, grid = Solver(inputs, GPTQ(), 32), Grid(int4_format(32))
        found = []
        methods = {"gptq": lambda: solver.round(weight, grid), "rtn": lambda: round_weight(weight, grid.format)}
        for method, work in methods.items():
            seconds: dict[str, list[tuple[float, float]]] = {"pytorch": [], "native": []}
            errors = {}
            for _ in range(self.rounds + 1):
                for name, operators in (("pytorch", lambda _: None), ("native", native_rounding)):
                    with (
                        patch.object(gptq, "native_rounding", operators),
                        patch.object(rounding, "native_rounding", operators),
                    ):
                        start = time.perf_counter(), time.process_time()
                        rounded = work()
                        seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
                    errors[name] = output_error(weight, rounded, inputs.gram)
            row: Report = {"method": method, "rows": n, "columns": k, "output_error": errors}
            for place, kind in enumerate(("seconds", "cpu_seconds")):
                medians = {name: statistics.median(one[place] for one in own[1:]) for name, own in seconds.items()}
                row[kind] = medians | {"ratio": medians["pytorch"] / medians["native"]}
            print(row, flush=True)
            found.append(row)
        return found


@dataclass(frozen=True, kw_only=True)
class GPTQVersions(Script):
    """`hasten quantize --scheme int4 --method gptq` of two versions in turns, each in a process of its own."""

    result = "quantize-versions"
    of_this_machine = ("model",)
    before_source: Path
    """The src folder of the other version."""
    model: str = "smollm2-135m"
    """A folder, or a published model's short name."""
    options: tuple[str, ...] = ("--scheme", "int4", "--samples", "32", "--length", "256")
    """Options of the command beside the method."""
    rounds: int = 3
    """Each version once in each, the other first in every second one."""

    def measure(self) -> Report:
        sources = {"before": self.before_source, "now": ROOT / "src"}
        seconds: dict[str, list[float]] = {name: [] for name in VERSIONS}
        with tempfile.TemporaryDirectory(prefix="hasten-quantize-versions-") as place:
            made = {name: Path(place) / name for name in VERSIONS}
            for number in range(self.rounds):
                for name in VERSIONS if number % 2 == 0 else VERSIONS[::-1]:
                    options = [*self.options, "--method", "gptq", "--output", str(made[name]), "--overwrite"]
                    seconds[name].append(hasten_of(sources[name], ["quantize", self.model, *options])["seconds"])
                    print(f"round {number + 1}, {name}: {seconds[name][-1]:.1f} s", flush=True)
            quality = {}
            for name in VERSIONS:  # both scored by this version
                scored = ["eval", str(made[name]), "--against", self.model, "--text", str(BOOK)]
                found = hasten_of(sources["now"], scored)
                quality[name] = {key: found[key] for key in KEPT}
        ratios = [before / now for before, now in zip(*seconds.values(), strict=True)]
        return {
            "model": Path(self.model).name,
            "commits": {name: commit(source) for name, source in sources.items()},
            "seconds": seconds,
            "median_seconds": {name: statistics.median(own) for name, own in seconds.items()},
            "ratio": {"median": statistics.median(ratios), "each": ratios},
            "quality": quality,
        }


def hasten_of(source: Path, arguments: list[str]) -> Any:
    """What a command reports with --json, run by the hasten of one source folder."""
    command = [sys.executable, "-m", "hasten", *arguments, "--json", "-"]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)


def versions_table(report: Report) -> str:
    """`quantize_versions.py versions`: seconds of each version, and the loss of what it makes."""
    rows = []
    for name in VERSIONS:
        quality, seconds = report["quality"][name], report["seconds"][name]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f} in {len(seconds)} rounds"
        change = f"{quality['perplexity'] / quality['against_perplexity'] - 1:+.1%}"
        rows.append(
            [name, f"{report['median_seconds'][name]:.1f}", spread, f"{quality['kl_mean']:.4f}", change],
        )
    return markdown(["version", "seconds", "in each round", "KL divergence", "perplexity"], rows)


def rounding_table(report: Report) -> str:
    """`quantize_versions.py rounding`: milliseconds of each, and their ratio."""
    rows = []
    for one in report["rows"]:
        times = [f"{1000 * one['cpu_seconds'][name]:.1f}" for name in ("pytorch", "native")]
        ratios = [f"{one[kind]['ratio']:.0f}×" for kind in ("cpu_seconds", "seconds")]
        errors = [f"{one['output_error'][name]:.4%}" for name in ("pytorch", "native")]
        rows.append([f"{one['method']}, {one['rows']} × {one['columns']}", *times, *ratios, *errors])
    head = ["", "PyTorch, CPU ms", "native, CPU ms", "ratio", "of seconds", "PyTorch's error", "native error"]
    return markdown(head, rows)


TABLES: dict[str, Table] = {"quantize-versions": versions_table, "quantize-rounding": rounding_table}


if __name__ == "__main__":
    main({"rounding": Rounding, "versions": GPTQVersions}, TABLES)
