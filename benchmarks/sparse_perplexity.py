"""What a sparse pattern costs and gives: perplexity and speed against dense attention, on Python's library.

    python benchmarks/sparse_perplexity.py --output benchmarks/results/sparse-perplexity.json

The same small model (the recipe demo with other sizes) is trained with each pattern on the same batches of 2,048
tokens, to the same number of tokens; perplexity is that of the held-out text at the end. Interrupted, it goes on where
it was. Then steps and forward passes of all models are timed in turn, in one process, in interleaved rounds; ratios to
dense are formed within a round, medians are over the rounds.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from timing import timed

if TYPE_CHECKING:
    from hasten.training import Recipe

PATTERNS: dict[str, str | None] = {
    "dense": None,
    "BigBird, window 3, 1 random": "bigbird",
    "Strided, radius 1, every 4th": "strided",
    "Local, radius 3": "local:radius=3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePerplexity:
    """Train with each pattern, then measure."""

    steps: int = 300
    """Optimizer steps of each, of 2 x 2,048 tokens."""

    rounds: int = 7
    """Interleaved rounds of the timing."""

    threads: int = 2
    """Threads of torch."""

    folder: Path = Path("runs/sparse")
    """Where the runs are."""

    only: int | None = None
    """Train the pattern of this number only, and measure nothing."""

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.training import train

        losses = {}
        for number, (name, pattern) in enumerate(PATTERNS.items()):
            if self.only in (None, number):
                losses[name] = train(recipe_of(self, number, pattern), progress=True).validation_loss
        if self.only is not None:
            return
        from hasten.machine import describe
        from hasten.machine.files import write_json

        result = {
            "schema": 1,
            "machine": describe().to_json(),
            "what": "recipe demo with 4 layers, 192 wide, 3 heads, rows of 2,048 tokens of Python's library, bfloat16",
            "settings": {"steps": self.steps, "tokens": self.steps * 2 * 2048, "rounds": self.rounds},
            "rows": measured(self, losses),
        }
        print(table(result["rows"]))
        if self.output is not None:
            write_json(self.output, result)


def recipe_of(settings: SparsePerplexity, number: int, pattern: str | None) -> "Recipe":
    """The recipe demo, smaller, with long rows."""
    from hasten.training import RECIPES

    demo = RECIPES["demo"]
    return replace(
        demo,
        name=f"pattern-{number}",
        model=replace(demo.model, layers=4, hidden_size=192, heads=3, feed_forward=512, attention_pattern=pattern),
        data=replace(demo.data, context=2048, batch_size=2),
        optimizer=replace(demo.optimizer, learning_rate=1.5e-3),
        run=replace(
            demo.run,
            minutes=None,
            steps=settings.steps,
            validate_every=settings.steps,
            validation_batches=40,
            checkpoint_every=50,
            export="last",
            folder=str(settings.folder),
            threads=settings.threads,
        ),
    )


def measured(settings: SparsePerplexity, losses: dict[str, float]) -> list[dict[str, Any]]:
    """One row a pattern."""
    import torch

    from hasten.data import Batch
    from hasten.training import TrainStep
    from hasten.training.setup import set_up

    steps: dict[str, TrainStep] = {}
    batch: Batch | None = None
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        setup = set_up(recipe_of(settings, number, pattern), progress=False)
        steps[name], batch = setup.step, setup.batches.batch(0)
    assert batch is not None
    seconds: dict[str, dict[str, list[float]]] = {name: {"step": [], "forward": []} for name in steps}
    for index in range(settings.rounds + 2):
        for name, step in steps.items():
            both = timed(lambda step=step: step.run([batch], learning_rate=0.0))  # type: ignore[misc]
            step.model.eval()
            with torch.no_grad():
                forward = timed(lambda step=step: step.loss(batch).item())  # type: ignore[misc]
            if index > 1:  # the first compile
                seconds[name]["step"].append(both)
                seconds[name]["forward"].append(forward)
    tokens = batch.inputs.numel()
    rows = []
    for name, step in steps.items():
        pattern = step.model.config.attention_pattern
        row: dict[str, Any] = {
            "name": name,
            "pattern": PATTERNS[name],
            "density": 1.0 if pattern is None else pattern.layout(-(-2048 // pattern.block)).density,
            "validation_loss": losses[name],
            "perplexity": math.exp(losses[name]),
        }
        for kind, own in seconds[name].items():
            row[f"{kind}_tokens_per_second"] = tokens / median(own)
            row[f"{kind}_speed_over_dense"] = median(
                dense / one for dense, one in zip(seconds["dense"][kind], own, strict=True)
            )
        row["rounds"] = seconds[name]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| attention | blocks | perplexity | training | speed | forward | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["name"], f"{row['density']:.0%}", f"{row['perplexity']:.1f}"]
        for kind in ("step", "forward"):
            cells += [f"{row[f'{kind}_tokens_per_second']:,.0f} tok/s", f"{row[f'{kind}_speed_over_dense']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    import tyro

    tyro.cli(SparsePerplexity).run()
