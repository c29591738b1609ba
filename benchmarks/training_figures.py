"""The figures of articles on training, as they stand there, measured on this machine (or with --device cuda on a GPU).

    python benchmarks/training_figures.py rungs --json benchmarks/results/article-rungs.json --picture …
    python benchmarks/training_figures.py batches --json benchmarks/results/article-batches.json --picture …
    python benchmarks/training_figures.py dropping --json benchmarks/results/layer-dropping.json --picture …

- rungs: figure 2 of "Accelerating Large Language Models with Accelerated Transformers" (PyTorch blog, 2023): GPT-2 124M
  over 1,024 tokens, one change after the other in its order, in the precision in which the machine is fast; beside it
  one layer's attention alone, and the product of the head alone with 50,257 and 50,304 columns.
- batches: its figure 3: explicit attention against flash, all else equal, each with its own largest batch in the same
  memory, for the same time; and flash with the batch of explicit attention, which tells the two reasons apart.
- dropping: progressive layer dropping (arXiv 2010.13369) and no dropping, at several learning rates, to the same loss.
"""

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
import tyro
from timing import interleaved

from hasten.bench.largest_batch import STEPS, LargestBatch
from hasten.bench.models import check_fits
from hasten.bench.race import Race
from hasten.bench.train import TrainLadder
from hasten.bench.train_rungs import FIRST, LAYER_DROP, PADDING, Rungs, cumulative, possible
from hasten.cli.bench import run as measure_and_write
from hasten.errors import ResourceError
from hasten.machine import available_memory, resolve_device, resolve_dtype, training_precision
from hasten.measure.draw import draw_curves
from hasten.measure.ladder import Ladder
from hasten.measure.options import say
from hasten.measure.process import Rung, run_interleaved
from hasten.measure.table import machine_line
from hasten.ops.attention import AttentionRequest, AttentionSpec, LayerAttention
from hasten.training.recipe import Recipe, Schedule, Techniques
from hasten.training.recipes import RECIPES

# Milliseconds of a batch on an A100 (eight of them). The article's two commits compile by default: its first bar is our
# second rung.
PUBLISHED = {"compile": 143, "math": 134, "memory-efficient": 119, "flash": 113, "padded-vocabulary": 87}
COLUMNS = (50_257, 50_304)
ARTICLE_ROWS = 12
PROBED = (2, 6)  # rows at which a GPU's memory is measured


def article_rungs(device: str) -> Rungs:
    """In the article's order. What does not concern them is on from the beginning."""
    words = f"{training_precision(device).dtype}, explicit attention, eager"
    narrow = {"precision": training_precision(device).dtype, "fused_optimizer": True, "keep_memory": device == "cpu"}
    ours = {"attention": None, "fused_activation": True, "joined_projections": True, "loss": None}
    if device != "cpu":
        ours |= {"whole_model": True, "capture": True}
    return {
        "explicit": (words, narrow),
        "compile": ("torch.compile per block", {"compile": True}),
        "math": ("math attention", {"attention": "math"}),
        # PyTorch has none on a CPU: ours in chunks.
        "memory-efficient": (
            "memory-efficient attention",
            {"attention": ("memory-efficient", "chunked")[device == "cpu"]},
        ),
        "flash": ("flash attention", {"attention": "flash"}),
        "padded-vocabulary": ("padded vocabulary", {"pad_vocabulary_to": PADDING}),
        "native-kernels": ("our kernels" if device == "cpu" else "one captured graph, our kernels", ours),
    }


@dataclass(frozen=True, kw_only=True)
class ArticleRungs(TrainLadder):
    """Figure 2 of the article."""

    shape: str | None = "gpt2-124m"
    batch_size: int | None = None
    """Rows in a batch (B): the article's 12, on a CPU 1."""
    sequence_length: int | None = 1024
    rounds: int = 4
    head_rows: int = 1024
    """Rows that the head is multiplied with alone."""
    alone: bool = True
    """Measure a layer's attention and the head alone, too."""

    def run(self) -> dict[str, Any]:
        from hasten.training.memory import step_memory

        device = str(resolve_device(self.device))
        rows = self.batch_size or (1 if device == "cpu" else ARTICLE_ROWS)
        recipe, config = self.recipe_and_config(rows)
        rungs = []
        for name, (techniques, words) in cumulative(article_rungs(device)).items():
            own = replace(recipe, techniques=techniques)
            memory = check_fits(name, step_memory(config, own, torch.device(device)), device)
            arguments = {"recipe": own, "config": config, "steps": self.steps, "device": device}
            rungs.append(Rung(name, words, "hasten.bench.train:TrainRung", arguments, memory))
        data = recipe.data
        settings = {"batch_size": data.batch_size, "sequence_length": data.context, "steps": self.steps}
        settings["model"] = f"{recipe.name} (random weights), batches of {data.batch_size} × {data.context} tokens"
        alone: dict[str, Any] = {}
        if self.alone:
            alone = {"attention": layer_attention(device, rows, recipe.data.context), "head": self.head(device)}
        chosen = [one for one in rungs if one.name in (self.rungs or one.name)]
        report = self.measure(chosen, kind="train", settings=settings, shared_cache=True)
        for row in report["rows"]:
            row["published_milliseconds"] = PUBLISHED.get(row["name"])
        return report | alone

    def head(self, device: str) -> dict[str, Any]:
        """Seconds of the product alone, forward and both products of the backward pass, in turns."""
        dtype, width = resolve_dtype(training_precision(device).dtype), 768
        x = torch.randn(self.head_rows, width, device=device, dtype=dtype, requires_grad=True)
        calls = {}
        for columns in COLUMNS:
            weight = torch.randn(columns, width, device=device, dtype=dtype, requires_grad=True)
            grad = torch.randn(self.head_rows, columns, device=device, dtype=dtype)

            def forward(weight: torch.Tensor = weight) -> None:
                with torch.no_grad():
                    F.linear(x, weight)
                synchronize(device)

            def both(weight: torch.Tensor = weight, grad: torch.Tensor = grad) -> None:
                x.grad = weight.grad = None
                F.linear(x, weight).backward(grad)
                synchronize(device)

            calls |= {("forward", columns): forward, ("forward and backward", columns): both}
        times = interleaved(calls, 10)
        rows = []
        for part in ("forward", "forward and backward"):
            odd, padded = (times[part, columns] for columns in COLUMNS)
            ratio = statistics.median(a / b for a, b in zip(odd, padded, strict=True))
            rows.append({"part": part, "seconds": [statistics.median(odd), statistics.median(padded)], "ratio": ratio})
        return {"rows": self.head_rows, "columns": COLUMNS, "dtype": str(dtype).removeprefix("torch."), "parts": rows}


def layer_attention(device: str, rows: int, tokens: int, heads: int = 12) -> list[dict[str, Any]]:
    """Seconds of one layer's attention alone, forward and backward, by kernel, eager and compiled, in turns."""
    dtype, shape = resolve_dtype(training_precision(device).dtype), (rows, tokens, heads, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)
    kernels = ["reference", "math", ("memory-efficient", "chunked")[device == "cpu"], "flash"]
    kernels += ["native"] if device == "cpu" else []
    spec = AttentionSpec(heads=heads, kv_heads=heads, head_dim=64, scale=64**-0.5)
    asked = AttentionRequest(spec=spec, device=torch.device(device), dtype=dtype)
    calls: dict[tuple[str, bool], Callable[[], None]] = {}
    for name, compiled in itertools.product(kernels, (False, True)):
        layer: Callable[..., torch.Tensor] = LayerAttention.bind(asked, forced=name)
        run = torch.compile(layer, dynamic=False) if compiled else layer

        def both(run: Callable[..., torch.Tensor] = run) -> None:
            q.grad = k.grad = v.grad = None
            with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):  # as a step is
                out = run(q, k, v)
            out.backward(grad.to(out.dtype))
            synchronize(device)

        calls[name, compiled] = both
    times = interleaved(calls, 10)
    return [
        {"kernel": name, "compiled": compiled, "seconds": statistics.median(own)}
        for (name, compiled), own in times.items()
    ]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Contest(Race):
    """A race of contestants that differ in more than a rung, repeated with other seeds."""

    repetitions: int = 3
    """With seeds 0, 1, …; all of them take turns."""
    tokenizer_kind: Literal["bpe", "character"] | None = None
    """Of the text's tokens; the recipe's own by default."""
    limit_bytes: int | None = None
    """Take only so many bytes of the text."""

    def held_bytes(self) -> int:
        """What a contestant keeps while it waits."""
        return 0

    def contestants(self, recipe: Recipe, device: str) -> Iterator[tuple[str, Recipe, dict[str, Any]]]:
        """Name, recipe, and what the report says of it."""
        raise NotImplementedError

    def prepared(self) -> tuple[Recipe, str]:
        """The recipe on the text, which is tokenized, and the device."""
        from hasten.training.setup import prepare_data

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
    """Of the schedule, about what the time is long enough for; a tenth of them warms up."""

    def held_bytes(self) -> int:
        return int(self.memory * (1 << 30))

    def contestants(self, recipe: Recipe, device: str) -> Iterator[tuple[str, Recipe, dict[str, Any]]]:
        from hasten.training import build
        from hasten.training.setup import prepare_data

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


if __name__ == "__main__":
    figures: dict[str, type[Ladder]] = {"rungs": ArticleRungs, "batches": ArticleBatches, "dropping": LayerDropping}
    measure_and_write(tyro.extras.subcommand_cli_from_dict(figures))
