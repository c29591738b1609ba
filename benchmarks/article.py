"""Figures 2 and 3 of "Accelerating Large Language Models with Accelerated Transformers" (PyTorch blog) in one command.

    python benchmarks/article.py --device cuda --json FILE --picture FILE

With the article's batch sizes on a GPU. The JSON is that of `training_figures.py rungs`, with figure 3 as "batches",
whose picture's name ends in `-batches`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from training_figures import ArticleBatches, ArticleRungs

from hasten.cli.bench import run as measure_and_write
from hasten.machine import resolve_device
from hasten.machine.files import write_json
from hasten.measure.options import BenchmarkOptions


@dataclass(frozen=True, kw_only=True)
class Article(BenchmarkOptions):
    """Figures 2 and 3 of the article, with its batch sizes on a GPU: every rung and contestant a process of its own."""

    steps: int | None = None
    """Optimizer steps measured in each round of figure 2; 10, on a CPU 1."""
    rounds: int = 2
    """Rounds of figure 2."""
    seconds: float = 1.5
    """Of each contestant of figure 3 in a round of 3."""
    tiny: bool = False
    """One rung of a tiny model in figure 2 and a small model in figure 3, to try the command."""

    def pictures(self, name: str) -> tuple[str, ...]:
        path = Path(name)
        return name, str(path.with_stem(f"{path.stem}-batches"))

    def parts(self) -> tuple[ArticleRungs, ArticleBatches]:
        same: dict[str, Any] = {"device": self.device, "threads": self.threads, "seed": self.seed}
        rungs: dict[str, Any] = same | {"rounds": self.rounds, "alone": False, "limit_seconds": 0.1}
        race: dict[str, Any] = same | {"rounds": 3, "seconds": self.seconds, "repetitions": 1}
        if self.tiny:
            rungs |= {"shape": "tiny", "batch_size": 2, "sequence_length": 32, "rungs": ("explicit",)}
            race |= {"memory": 1, "update_rows": 4, "steps": 8, "extrapolate": True, "limit_bytes": 1 << 20}
            return ArticleRungs(**rungs), ArticleBatches(**race | {"rounds": 1, "recipe": "shakespeare-char"})
        if str(resolve_device(self.device)) == "cpu":
            return ArticleRungs(**rungs | {"alone": True}, steps=self.steps or 1), ArticleBatches(**race)
        # The article's model on characters: a tokenizer of its vocabulary would have to be trained first.
        race |= {"recipe": "gpt2-124m", "tokenizer_kind": "character", "limit_bytes": 8 << 20}
        batches = ArticleBatches(**race, memory=16, update_rows=48, steps=60)
        return ArticleRungs(**rungs, steps=self.steps or 10), batches

    def run(self) -> dict[str, Any]:
        rungs, batches = self.parts()
        report = rungs.run()
        if self.json not in (None, "-"):  # figure 2 is kept whatever becomes of figure 3
            write_json(self.json, report)
        return report | {"batches": batches.run()}

    def draw(self, report: Mapping[str, Any], *paths: str) -> None:
        for part, found, path in zip(self.parts(), (report, report["batches"]), paths, strict=True):
            part.draw(found, path)

    def show(self, report: Mapping[str, Any]) -> bool:
        rungs, batches = self.parts()
        return rungs.show(report) and batches.show(report["batches"])


if __name__ == "__main__":
    measure_and_write(tyro.cli(Article, description=__doc__))
