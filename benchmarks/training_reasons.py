"""Why figures 2 and 3 of `training_figures.py` are what they are on this machine.

    python benchmarks/training_reasons.py --output benchmarks/results/article-reasons.json

- attention: one layer's alone, of the character model's rows of 256 tokens, with figure 3's micro-batches.
- operators: where the steps of two rungs of figure 2 go, by torch's profiler: what the calling thread spends in each
  operator itself (compiled code counts as the operator that calls it). The steps of both take turns.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from torch.profiler import ProfilerActivity, profile
from training_figures import ArticleRungs, article_rungs, layer_attention

from hasten.bench.train import TrainRung
from hasten.bench.train_rungs import cumulative
from hasten.machine import configure, describe
from hasten.machine.files import write_json


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Measure and write."""

    rows: tuple[int, ...] = (1, 20, 30)
    """Of 256 tokens, six heads."""
    rungs: tuple[str, ...] = ("compile", "math")
    """Of figure 2."""
    rounds: int = 4
    output: Path | None = None

    def run(self) -> None:
        configure()
        found: dict[str, Any] = {"schema": 1, "machine": describe().to_json()}
        found["attention"] = [
            {"rows": rows, "tokens": 256} | one
            for rows in self.rows
            for one in layer_attention("cpu", rows, 256, heads=6)
        ]
        print(json.dumps(found["attention"], indent=1), flush=True)
        found["operators"] = self.operators()
        print(json.dumps(found["operators"], indent=1), flush=True)
        if self.output is not None:
            write_json(self.output, found)

    def operators(self) -> dict[str, Any]:
        """Milliseconds of a step by operator, those of at least 1% of a step: medians over the rounds."""
        recipe, config = ArticleRungs().recipe_and_config(1)
        rungs = cumulative(article_rungs("cpu"))
        steps = {
            name: TrainRung(recipe=replace(recipe, techniques=rungs[name][0]), config=config, steps=1, device="cpu")
            for name in self.rungs
        }
        for step in steps.values():
            step.measure()
        plain: dict[str, list[float]] = {name: [] for name in steps}
        parts: dict[str, list[Mapping[str, float]]] = {name: [] for name in steps}
        for _ in range(self.rounds):
            for name, step in steps.items():
                plain[name].append(step.measure()["milliseconds_per_batch"])
                with profile(activities=[ProfilerActivity.CPU]) as traced:
                    step.measure()
                parts[name].append({one.key: one.self_cpu_time_total / 1e3 for one in traced.key_averages()})
        return {
            name: {
                "milliseconds": statistics.median(plain[name]),
                "operators": {
                    key: took
                    for key in parts[name][0]
                    if (took := statistics.median(one.get(key, 0.0) for one in parts[name])) > plain[name][0] / 100
                },
            }
            for name in steps
        }


if __name__ == "__main__":
    tyro.cli(Reasons).run()
