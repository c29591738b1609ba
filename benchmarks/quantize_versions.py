"""How long GPTQ takes beside another version of hasten, and what both make of the model.

    git worktree add /tmp/before COMMIT
    python benchmarks/quantize_versions.py --before-source /tmp/before/src --output benchmarks/results/quantize-versions.json
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.data.book import BOOK
from hasten.measure.script import Report, Script, Table, main, markdown
from speeds import ROOT, commit

VERSIONS = ("before", "now")
KEPT = ("kl_mean", "perplexity", "against_perplexity")


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
    """Of the command, beside the method."""
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
    """`quantize_versions.py`: seconds of each version, and the loss of what it makes."""
    rows = []
    for name in VERSIONS:
        quality, seconds = report["quality"][name], report["seconds"][name]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f} in {len(seconds)} rounds"
        change = f"{quality['perplexity'] / quality['against_perplexity'] - 1:+.1%}"
        rows.append(
            [name, f"{report['median_seconds'][name]:.1f}", spread, f"{quality['kl_mean']:.4f}", change],
        )
    return markdown(["version", "seconds", "in each round", "KL divergence", "perplexity"], rows)


TABLES: dict[str, Table] = {"quantize-versions": versions_table}


if __name__ == "__main__":
    main({"gptq": GPTQVersions}, TABLES)
