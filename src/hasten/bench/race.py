"""Validation loss against wall time: one model and text, trained with what different rungs of the ladder switch on.

The contestants take turns, some seconds each in every round, so that all of them meet the same conditions; the clock of
each one stops while it waits, and while it measures its validation loss.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hasten.bench.train import kept_work, known_recipe, with_batch
from hasten.bench.train_rungs import recipes
from hasten.machine import resolve_device
from hasten.measure.draw import draw_curves
from hasten.measure.ladder import Ladder
from hasten.measure.options import check_finite, check_least, say
from hasten.measure.process import Rung
from hasten.measure.table import machine_line, print_ladder
from hasten.training.recipe import Recipe
from hasten.training.schedules import learning_rate

BEFORE, AFTER = "explicit-float32", "native-kernels"


def first_and_last(device: str) -> tuple[str, str]:
    """The lowest rung, and the highest one that is only faster."""
    return BEFORE, AFTER if device == "cpu" else "fused-optimizer-and-loss"


@dataclass(frozen=True, kw_only=True)
class Race(Ladder):
    """Training: validation loss against wall time, before and after all techniques, and with layer dropping."""

    title: ClassVar[str] = "Race"
    rungs: tuple[str, ...] = ()
    """Rungs of bench train, separated by commas; the first, the fastest and layer dropping by default."""
    recipe: str = "shakespeare-char"
    """Whose model is trained: demo, gpt2-124m, llama-120m, shakespeare-char."""
    source: str | None = "stdlib"
    """The text, as --data.source of hasten train."""
    batch_size: int | None = None
    """Rows in a batch (B)."""
    sequence_length: int | None = None
    """Tokens in a row (T)."""
    rounds: int = 6
    """Turns of each contestant."""
    warmup: int = 0
    """Turns before them that are not counted, although the contestants learn in them."""
    seconds: float = 10.0
    """Training time of each in a turn."""
    steps: int = 200
    """Assumed length of the run, for the schedules of the learning rate and of layer dropping."""

    def run(self) -> dict[str, Any]:
        """Train and return the report. Raises ConfigError for what does not exist, DataError for the text."""
        from hasten.training.setup import prepare_data

        recipe = known_recipe(self.recipe, "to race with")
        check_finite("--seconds", self.seconds)
        check_least("--steps", self.steps)
        device = str(resolve_device(self.device))
        recipe = with_batch(recipe, self.batch_size, self.sequence_length, seed=self.seed)
        data = replace(recipe.data, source=self.source or recipe.data.source)
        recipe = replace(recipe, data=data, dropout=0.0, run=replace(recipe.run, steps=self.steps, device=device))
        # Before any process: a missing text is an error at once, and its vocabulary decides what padding changes.
        vocab_size = prepare_data(recipe, init=None, progress=True).tokenizer.vocab_size
        text = Path(data.source).name or data.source  # never a whole path
        wanted = self.rungs or (*first_and_last(device), "layer-drop")
        rungs = []
        for name, (own, words) in recipes(recipe, device, vocab_size=vocab_size, wanted=wanted).items():
            rungs.append(Rung(name, words, "hasten.bench.race:RaceRung", {"recipe": own, "seconds": self.seconds}))
        return self.measure(
            rungs,
            kind="train",
            settings={
                "model": f"{recipe.name} on {text}, {data.batch_size} × {data.context} tokens",
                "vocabulary": vocab_size,
                "batch_size": data.batch_size,
                "sequence_length": data.context,
                "seconds": self.seconds,
                "steps": self.steps,
            },
        )

    def draw(self, report: Mapping[str, Any], path: str | Path) -> None:
        """Validation loss over the seconds of training, a curve for each contestant, as a PNG."""
        rounds = {row["name"]: row["rounds"] for row in report["rows"] if row.get("rounds")}
        settings = report["settings"]
        draw_curves(
            {
                name: ([one["training_seconds"] for one in each], [one["validation_loss"] for one in each])
                for name, each in rounds.items()
            },
            path,
            title="Validation loss against wall time",
            subtitle=f"{settings['model']}; {machine_line(report['machine'], settings['device'])}",
            x_label="seconds of training, compiling left out",
            y_label="validation loss, nats a token",
        )

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print the table and where each contestant came to; whether any could be measured."""
        print_ladder(report)
        for row in report["rows"]:
            if row.get("rounds"):
                last = row["rounds"][-1]
                text = f"validation loss {last['validation_loss']:.4f} after {last['training_seconds']:.0f} s"
                say(f"{row['name']}: {text}, {last['step']:.0f} steps")
        return any("error" not in row for row in report["rows"])


class RaceRung:
    """One contestant: trains for some seconds whenever it is asked to, and says where it is."""

    def __init__(self, *, recipe: Recipe, seconds: float) -> None:
        from hasten.training.setup import set_up

        self.recipe, self.seconds = recipe, seconds
        self.setup = set_up(recipe, progress=False)
        self.source = self.setup.batches.iterate(0)
        self.step = self.tokens = 0
        self.scales: list[list[float]] = []
        self.spent = 0.0
        start = time.perf_counter()
        self._one()  # compiles; what it learns counts, its time is reported separately
        self._one()
        self.compile_seconds = time.perf_counter() - start
        self._validate()

    def describe(self) -> dict[str, Any]:
        """What one token costs, all blocks counted, and how long the first two steps took."""
        return {
            "flops_per_token": self.setup.flops_per_token,
            "matrix_dtype": self.recipe.techniques.precision,
            "first_steps_seconds": self.compile_seconds,
        }

    def measure(self) -> dict[str, float]:
        """Train for about `seconds`; then the validation loss. training_seconds and step: since the beginning."""
        start, tokens = time.perf_counter(), self.tokens
        self.scales = []
        while time.perf_counter() - start < self.seconds:
            loss = self._one()
        elapsed = time.perf_counter() - start
        self.spent += elapsed
        return {
            "tokens_per_second": (self.tokens - tokens) / elapsed,
            "training_seconds": self.spent,
            "step": float(self.step),
            "loss": loss,
            "validation_loss": self._validate(),
        } | kept_work(self.setup.model.config, self.recipe, self.scales)

    def _one(self) -> float:
        from hasten.training.layer_drop import block_scales_of_step

        rate = learning_rate(
            self.recipe.schedule, peak=self.recipe.optimizer.learning_rate, step=self.step, total=self.recipe.run.steps
        )
        layers = len(self.setup.model.blocks)
        block_scales = block_scales_of_step(self.recipe, layers=layers, step=self.step, total=self.recipe.run.steps)
        self.scales += block_scales or []
        batches = [next(self.source)[1] for _ in range(self.recipe.data.accumulation)]
        result = self.setup.step.run(batches, learning_rate=rate, block_scales=block_scales)
        assert result is not None
        self.step += 1
        self.tokens += result.tokens
        return float(result.loss)

    def _validate(self) -> float:
        assert self.setup.validation is not None
        return self.setup.validation.loss(self.setup.step)
