"""Contests of training runs that take turns: the largest batches in the same memory, and layer dropping.

    python benchmarks/training_races.py batches --json benchmarks/results/article-batches.json --picture …
    python benchmarks/training_races.py article --device cuda --json FILE --picture FILE
    python benchmarks/training_races.py dropping --json benchmarks/results/layer-dropping.json --picture …

- batches: figure 3 of the article that training_figures.py is about: explicit attention against flash, all else equal,
  each with its own largest batch in the same memory, for the same time; and flash with the batch of explicit attention,
  which tells the two reasons apart.
- article: figures 2 and 3 in one command, with the article's batch sizes on a GPU. The JSON is that of figure 2, with
  figure 3 as "batches", whose picture's name ends in `-batches`.
- dropping: progressive layer dropping (arXiv 2010.13369) and no dropping, at several learning rates, to the same loss.
"""

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar, Literal

from training_figures import ArticleRungs, article_rungs

from hasten.bench.largest_batch import STEPS, LargestBatch
from hasten.bench.race import Race
from hasten.bench.train_rungs import FIRST, LAYER_DROP, cumulative, possible
from hasten.errors import ResourceError
from hasten.machine import available_memory, resolve_device
from hasten.machine.files import write_json
from hasten.measure.draw import draw_curves
from hasten.measure.options import BenchmarkOptions, say
from hasten.measure.process import Rung, run_interleaved
from hasten.measure.script import Report, Table, main, markdown
from hasten.measure.table import machine_line
from hasten.training import build
from hasten.training.recipe import Recipe, Schedule, Techniques
from hasten.training.recipes import RECIPES
from hasten.training.setup import prepare_data

# Milliseconds of a batch on an A100 (eight of them). The article's two commits compile by default: its first bar is our
# second rung.
PROBED = (2, 6)  # rows at which a GPU's memory is measured


@dataclass(frozen=True, kw_only=True)
class Contest(Race):
    """A race of contestants that differ in more than a rung, repeated with other seeds."""

    repetitions: int = 3
    """With seeds 0, 1, …; all of them take turns."""
    tokenizer_kind: Literal["bpe", "character"] | None = None
    """Kind of the text's tokens; the recipe's own by default."""
    limit_bytes: int | None = None
    """Take only this many bytes of the text."""

    def held_bytes(self) -> int:
        """What a contestant keeps while it waits."""
        return 0

    def contestants(self, recipe: Recipe, device: str) -> Iterator[tuple[str, Recipe, dict[str, Any]]]:
        """Name, recipe, and what the report says of it."""
        raise NotImplementedError

    def prepared(self) -> tuple[Recipe, str]:
        """The recipe on the text, which is tokenized, and the device."""
        device, recipe = str(resolve_device(self.device)), RECIPES[self.recipe]
        data = replace(recipe.data, source=self.source or recipe.data.source, accumulation=1)
        data = replace(data, tokenizer_kind=self.tokenizer_kind or data.tokenizer_kind, limit_bytes=self.limit_bytes)
        recipe = replace(recipe, data=data, dropout=0.0, run=replace(recipe.run, steps=self.steps, device=device))
        prepare_data(recipe, init=None, progress=True)
        return recipe, device

    def run(self) -> dict[str, Any]:
        recipe, device = self.prepared()
        rungs, said = [], {}
        for name, own, facts in self.contestants(recipe, device):
            for seed in range(self.repetitions):
                seeded = replace(own, run=replace(own.run, seed=seed))
                said[f"{name}, {seed}"] = {"contestant": name, "seed": seed} | facts
                arguments = {"recipe": seeded, "seconds": self.seconds}
                setup = "hasten.bench.race:RaceRung"
                rungs.append(Rung(f"{name}, {seed}", (), setup, arguments, self.held_bytes()))
        settings = {"model": f"{recipe.name} on {recipe.data.source}", "seconds": self.seconds, "steps": self.steps}
        report = self.measure(rungs, kind="train", settings=settings | self.settings(recipe))
        for row in report["rows"]:
            if "error" in row:
                raise SystemExit(f"{row['name']}: {row['error']}")
            row |= said[row["name"]]
        return report | self.summary(report["rows"])

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        return {"batch_size": recipe.data.batch_size, "sequence_length": recipe.data.context}

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the report says of all of them."""
        raise NotImplementedError

    def draw(self, report: Mapping[str, Any], path: str | Path) -> None:
        curves = {
            row["name"]: tuple([one[key] for one in row["rounds"]] for key in ("training_seconds", "validation_loss"))
            for row in report["rows"]
            if row.get("rounds")
        }
        settings = report["settings"]
        draw_curves(
            curves,  # type: ignore[arg-type]
            path,
            title=self.title,
            subtitle=f"{settings['model']}; {machine_line(report['machine'], settings['device'])}",
            x_label="seconds of training, compiling left out",
            y_label="validation loss, nats a token",
        )


@dataclass(frozen=True, kw_only=True)
class ArticleBatches(Contest):
    """Figure 3 of the article."""

    title: ClassVar[str] = "The largest batch in the same memory, for the same time"
    memory: float = 1.5
    """GiB of a process, above what it has with torch imported."""
    found: Path | None = None
    """What was searched: written where it is not there, else read (memory does not depend on what else runs)."""
    update_rows: int = 32
    """Rows of an update, the same for all: a contestant takes them in as few equal micro-batches as fit."""
    extrapolate: bool = False
    """Find the largest batches by the peaks of two sizes, as on a GPU, where memory grows evenly with the rows."""
    rounds: int = 12
    seconds: float = 10.0
    steps: int = 120
    """Length of the schedule, about what the time is long enough for; a tenth of them warms up."""

    def held_bytes(self) -> int:
        return int(self.memory * (1 << 30))

    def contestants(self, recipe: Recipe, device: str) -> Iterator[tuple[str, Recipe, dict[str, Any]]]:
        rungs, largest = cumulative(article_rungs(device)), {}
        if self.found is not None and self.found.exists():
            largest = json.loads(self.found.read_text())
        else:
            vocab = prepare_data(recipe, init=None, progress=False).tokenizer.vocab_size
            config = build.shape_config(recipe.model, vocab_size=vocab, positions=recipe.data.context)
            with tempfile.TemporaryDirectory(prefix="hasten-compile-") as cache:
                process: dict[str, Any] = {"device": device, "threads": self.threads, "seed": 0}
                tried = {}
                for name in ("compile", "flash"):
                    own = replace(recipe, techniques=rungs[name][0])
                    arguments = {"recipe": own, "config": config, "steps": STEPS, "device": device, "memory": None}
                    setup = "hasten.bench.largest_batch:LimitedRung"
                    tried[name] = Rung(name, (), setup, arguments, compile_cache=f"{cache}/{name}", **process)
                largest = (
                    self.extrapolated(tried, device) if self.extrapolate or device != "cpu" else self.searched(tried)
                )
        for name, rows in largest.items():
            say(f"{name}: {rows} rows in {self.memory:g} GiB")
        if self.found is not None:
            self.found.write_text(json.dumps(largest))
        for called, name, limit in (
            ("explicit", "compile", largest["compile"]),
            ("flash", "flash", largest["flash"]),
            ("flash, explicit's batch", "flash", largest["compile"]),
        ):
            rows = max(size for size in range(1, limit + 1) if self.update_rows % size == 0)
            data = replace(recipe.data, batch_size=rows, accumulation=self.update_rows // rows)
            checked = replace(recipe.run, validation_batches=2 * self.update_rows // rows)  # the same rows for all
            facts = {"largest_batch": limit, "batch_size": rows, "accumulation": self.update_rows // rows}
            schedule = replace(recipe.schedule, warmup_steps=self.steps // 10)
            yield called, replace(recipe, techniques=rungs[name][0], data=data, run=checked, schedule=schedule), facts

    def searched(self, tried: Mapping[str, Rung]) -> dict[str, int]:
        """The largest batches by trying: each in a process that may take no more."""
        search = LargestBatch(memory=self.memory, most=self.update_rows).search
        tries = {name: search(rung) for name, rung in tried.items()}
        return {name: max((size for size, fits in own.items() if fits), default=0) for name, own in tries.items()}

    def extrapolated(self, tried: Mapping[str, Rung], device: str) -> dict[str, int]:
        """The largest batches by the peaks of two sizes, measured side by side."""
        probes = []
        for rung, rows in itertools.product(tried.values(), PROBED):
            recipe = rung.arguments["recipe"]
            sized = replace(recipe, data=replace(recipe.data, batch_size=rows))
            cache = f"{rung.compile_cache}-{rows}"
            probes.append(replace(rung, arguments=rung.arguments | {"recipe": sized}, compile_cache=cache))
        runs = run_interleaved(probes, rounds=1, room=available_memory(device))
        largest = {}
        for name, (few, many) in zip(tried, zip(runs[::2], runs[1::2], strict=True), strict=True):
            for run in (few, many):
                if run.error is not None:
                    raise ResourceError(f"{name}: {run.error}")
            each = max(1.0, (many.peak_memory_bytes - few.peak_memory_bytes) / (PROBED[1] - PROBED[0]))
            left = self.held_bytes() - few.peak_memory_bytes
            largest[name] = max(1, min(self.update_rows, PROBED[0] + int(left / each)))
        return largest

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        return super().settings(recipe) | {"batch_size": self.update_rows, "memory_gib": self.memory}

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            own = found.setdefault(row["contestant"], {"losses": [], "tokens_per_second": [], "steps": []})
            own["batch_size"], own["largest_batch"] = row["batch_size"], row["largest_batch"]
            own["losses"].append(row["rounds"][-1]["validation_loss"])
            own["steps"].append(row["rounds"][-1]["step"])
            own["tokens_per_second"].append(row["tokens_per_second"])
        return {"contestants": found}


@dataclass(frozen=True, kw_only=True)
class LayerDropping(Contest):
    """Layer dropping to the same validation loss."""

    title: ClassVar[str] = "Layer dropping and none, at several learning rates"
    recipe: str = "demo"
    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    """Times the recipe's own, constant after the warm-up."""
    repetitions: int = 1
    rounds: int = 6
    seconds: float = 10.0
    steps: int = 1000

    def contestants(self, recipe: Recipe, device: str) -> Iterator[tuple[str, Recipe, dict[str, Any]]]:
        fields = FIRST | {
            name: value for _, adds in possible(device, vocab_size=None).values() for name, value in adds.items()
        }
        fields |= {"checkpointing": "none", "layer_drop": None}
        constant = Schedule(kind="wsd", warmup_steps=recipe.schedule.warmup_steps, decay_fraction=0.0)
        for dropped in (None, LAYER_DROP):
            for rate in self.rates:
                name = ("no dropping" if dropped is None else "layer dropping") + f", rate × {rate:g}"
                optimizer = replace(recipe.optimizer, learning_rate=rate * recipe.optimizer.learning_rate)
                techniques = Techniques(**fields | {"layer_drop": dropped})
                facts = {"rate": optimizer.learning_rate, "layer_drop": dropped}
                yield name, replace(recipe, optimizer=optimizer, schedule=constant, techniques=techniques), facts

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Means over the seeds, and when each has the loss that the best of those without dropping ends with (None: not
        within its time).
        """
        seeds: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            seeds.setdefault(row["contestant"], []).append(row)
        means = {
            name: [
                {key: statistics.mean(each[key] for each in point) for key in ("training_seconds", "validation_loss")}
                for point in zip(*(row["rounds"] for row in own), strict=True)
            ]
            for name, own in seeds.items()
        }
        without = [name for name, own in seeds.items() if own[0]["layer_drop"] is None]
        best = min(without, key=lambda name: means[name][-1]["validation_loss"])
        goal = means[best][-1]["validation_loss"]
        found = {name: seconds_to(points, goal) for name, points in means.items()}
        return {"goal": {"loss": goal, "of": best}, "seconds_to_goal": found}


def seconds_to(rounds: Sequence[Mapping[str, float]], goal: float) -> float | None:
    """When a curve comes down to a loss, on a line between its points."""
    for before, after in itertools.pairwise(rounds):
        (a, x), (b, y) = ((one["validation_loss"], one["training_seconds"]) for one in (before, after))
        if b <= goal < a:
            return x + (y - x) * (a - goal) / (a - b)
    return None


@dataclass(frozen=True, kw_only=True)
class Article(BenchmarkOptions):
    """Figures 2 and 3 of the article, with its batch sizes on a GPU: every rung and contestant a process of its own."""

    steps: int | None = None
    """Optimizer steps measured in each round of figure 2; 10, on a CPU 1."""
    rounds: int = 2
    """Rounds of figure 2."""
    seconds: float = 1.5
    """Training time of each contestant of figure 3 in a round of 3."""
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


def batch_table(report: Report) -> str:
    """Each contestant at the end of its time."""
    rows = []
    for name, found in report["contestants"].items():
        losses = found["losses"]
        spread = f"{median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        cells = [str(found["largest_batch"]), str(found["batch_size"]), f"{median(found['tokens_per_second']):,.0f}"]
        rows.append([name, *cells, f"{median(found['steps']):.0f}", spread])
    head = ["", "rows that fit", "of a micro-batch", "tokens/s", "updates", "validation loss"]
    return markdown(head, rows)


def dropping_table(report: Report) -> str:
    """Where each came to, and when its mean curve had the goal's loss."""
    goal, seeds = report["goal"], dict[str, list[dict[str, Any]]]()
    for row in report["rows"]:
        seeds.setdefault(row["contestant"], []).append(row)
    rows = []
    for name, own in seeds.items():
        last, seconds = [row["rounds"][-1] for row in own], report["seconds_to_goal"][name]
        losses = [one["validation_loss"] for one in last]
        cells = [
            f"{own[0]['rate']:.1e}",
            f"{mean(one.get('kept_blocks', 1) for row in own for one in row['rounds']):.0%}",
            f"{mean(one['step'] for one in last):.0f}",
            f"{1e3 * mean(one['training_seconds'] / one['step'] for one in last):.0f}",
            f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
        ]
        rows.append([name, *cells, "not reached" if seconds is None else f"{seconds:.0f}"])
    head = ["", "rate", "blocks run", "steps", "ms a step", "validation loss", f"seconds to {goal['loss']:.3f}"]
    return markdown(head, rows)


def race_table(report: Report) -> str:
    """`hasten bench race`: each contestant after the last round."""
    per_step = report["settings"]["batch_size"] * report["settings"]["sequence_length"]
    rows = []
    for one in report["rows"]:
        last = one["rounds"][-1]
        step = f"{1e3 * per_step / last['tokens_per_second']:,.0f}"
        seconds, loss = f"{last['training_seconds']:.0f}", f"{last['validation_loss']:.3f}"
        rows.append([f"`{one['name']}`", f"{last['step']:.0f}", seconds, step, loss])
    return markdown(["rung", "steps", "seconds", "ms a step", "validation loss"], rows)


def largest_table(report: Report) -> str:
    """`hasten bench batch`."""
    memory, tokens = report["settings"]["memory_bytes"] / 2**30, report["settings"]["sequence_length"]
    rows = [[f"`{one['name']}`", str(one["largest_batch"])] for one in report["rows"]]
    return markdown(["rung", f"rows of {tokens:,} tokens in {memory:g} GiB"], rows)


TABLES: dict[str, Table] = {
    "article-batches": batch_table,
    "layer-dropping": dropping_table,
    "race-character": race_table,
    **dict.fromkeys(("largest-batch-character", "largest-batch-gpt2-124m"), largest_table),
}


if __name__ == "__main__":
    main({"batches": ArticleBatches, "dropping": LayerDropping, "article": Article}, TABLES)
