"""Fails where a finished run trained at less than a share of this machine's float32 rate, which is measured now.

python benchmarks/check_speed.py runs/avx2/demo --at-least 0.1

Far below what training reaches, so that other work on the machine does not matter; emulated products and kernels whose
vectors live on the stack are below it by a factor.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpeed:
    """Compare, print, and exit with 1 where it is too slow."""

    run_folder: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run: recipe.json, train.jsonl, model/."""

    at_least: float = 0.1
    """Share of the float32 rate."""

    def run(self) -> None:
        from hasten.machine import configure, matrix_rate
        from hasten.model.families import read_config
        from hasten.planning.cost import training_flops_per_token
        from hasten.training.journal import read

        configure()
        config = read_config(json.loads((self.run_folder / "model" / "config.json").read_text()))
        context = json.loads((self.run_folder / "recipe.json").read_text())["data"]["context"]
        lines = read(self.run_folder / "train.jsonl")
        if not lines:
            sys.exit(f"{self.run_folder} has no step in its train.jsonl")
        tokens = statistics.median(line["tokens_per_second"] for line in lines)
        flops = tokens * training_flops_per_token(config, context)
        rate = matrix_rate("float32")
        print(f"trained at {flops / 1e9:.1f} GFLOP/s, {flops / rate:.0%} of float32's {rate / 1e9:.0f}")
        if flops < self.at_least * rate:
            sys.exit(f"that is below {self.at_least:.0%}: what ran was emulated, or a kernel is slow on this processor")


if __name__ == "__main__":
    tyro.cli(CheckSpeed).run()
