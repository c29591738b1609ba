"""`hasten bench race` and `hasten bench batch`: what faster training is good for, and what less memory is good for."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from hasten.cli.options import Threads, thread_count
from hasten.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What both share."""

    rungs: str = ""
    """Rungs of bench train, separated by commas; the first and the fastest (race: and layer dropping) by default."""
    sequence_length: int | None = None
    """Tokens in a row (T)."""
    json: str | None = None
    """Write the report as JSON to this file; "-": to standard output, and nothing else there."""
    picture: str | None = None
    """Draw it into this PNG."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    seed: int = 0
    """Decides the random weights and the order of the data."""

    def names(self) -> tuple[str, ...]:
        """The rungs as a tuple, after a check that the files can be written."""
        from hasten.bench.report import require_writable

        require_writable(self.json)
        require_writable(self.picture)
        return tuple(name.strip() for name in self.rungs.split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class BenchRace(TrainOptions):
    """Training: validation loss against wall time, before and after all techniques, and with layer dropping."""

    recipe: str = "shakespeare-char"
    """Whose model is trained: demo, gpt2-124m, llama-120m, shakespeare-char."""
    source: str | None = "stdlib"
    """The text, as --data.source of hasten train."""
    batch_size: int | None = None
    """Rows in a batch (B)."""
    rounds: int = 6
    """Turns of each contestant."""
    seconds: float = 10.0
    """Each one trains so long in a turn."""
    steps: int = 200
    """How long the run is taken to be, for the schedule of layer dropping."""

    def run(self) -> None:
        from hasten.bench.race import Race
        from hasten.bench.report import write_json
        from hasten.bench.table import print_ladder
        from hasten.bench.train_pictures import draw_race

        report = Race(
            rungs=self.names(),
            recipe=self.recipe,
            source=self.source,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            seconds=self.seconds,
            rounds=self.rounds,
            steps=self.steps,
            device=self.device,
            threads=thread_count(self.threads),
            seed=self.seed,
        ).run()
        if self.json is not None:
            write_json(self.json, report)
        if self.picture is not None:
            draw_race(report, self.picture)
        print_ladder(report)
        for row in report["rows"]:
            if row.get("rounds"):
                last = row["rounds"][-1]
                text = f"validation loss {last['validation_loss']:.4f} after {last['training_seconds']:.0f} s"
                print(f"{row['name']}: {text}, {last['step']:.0f} steps", file=sys.stderr)
        if all("error" in row for row in report["rows"]):
            raise SystemExit(1)


@dataclass(frozen=True, kw_only=True)
class BenchBatch(TrainOptions):
    """Training: the largest batch that fits a given memory, before and after all techniques."""

    shape: str | None = None
    """A named shape, as for bench train."""
    recipe: str | None = None
    """The model of a recipe instead."""
    memory: float = 2.0
    """GiB that a process may take, above what it has with torch imported."""
    most: int = 1024
    """Try no larger batch."""

    def run(self) -> None:
        from hasten.bench.largest_batch import LargestBatch
        from hasten.bench.report import write_json
        from hasten.bench.train_pictures import draw_batches

        if not (math.isfinite(self.memory) and self.memory > 0):
            raise ConfigError(f"--memory is {self.memory:g} GiB; it must be a finite number above 0")
        report = LargestBatch(
            rungs=self.names(),
            shape=self.shape,
            recipe=self.recipe,
            memory=int(self.memory * (1 << 30)),
            sequence_length=self.sequence_length,
            most=self.most,
            device=self.device,
            threads=thread_count(self.threads),
            seed=self.seed,
        ).run(tell=lambda text: print(text, file=sys.stderr, flush=True))
        if self.json is not None:
            write_json(self.json, report)
        if self.picture is not None:
            draw_batches(report, self.picture)
        for row in report["rows"]:
            print(f"{row['name']}: a batch of {row['largest_batch']} fits {self.memory:g} GiB", file=sys.stderr)
        if not any(row["largest_batch"] for row in report["rows"]):
            raise SystemExit(1)
