"""The figures of articles on training, measured on this machine (or with --device cuda on a GPU).

    python benchmarks/training_figures.py rungs --json benchmarks/results/article-rungs.json --picture …
    python benchmarks/training_figures.py reasons --output benchmarks/results/article-reasons.json
    python benchmarks/training_figures.py check-speed --run-folder runs/avx2/demo

- rungs: figure 2 of "Accelerating Large Language Models with Accelerated Transformers" (PyTorch blog, 2023): GPT-2 124M
  over 1,024 tokens, one change after the other in its order, in the precision in which the machine is fast; beside it
  one layer's attention alone, and the product of the head alone with 50,257 and 50,304 columns.
- reasons: why figures 2 and 3 are what they are here.

Figure 3, both figures in one command, and layer dropping: training_races.py.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from hasten.bench.models import check_fits
from hasten.bench.train import TrainLadder, TrainRung
from hasten.bench.train_rungs import PADDING, Rungs, cumulative
from hasten.machine import (
    configure,
    matrix_rate,
    resolve_device,
    resolve_dtype,
    training_precision,
)
from hasten.measure.process import Rung
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.timing import interleaved
from hasten.model.families import read_config
from hasten.ops.attention import AttentionRequest, AttentionSpec, LayerAttention
from hasten.planning.cost import training_flops_per_token
from hasten.training.journal import read
from hasten.training.memory import step_memory

# Milliseconds of a batch on an A100 (eight of them). The article's two commits compile by default: its first bar is our
# second rung.
PUBLISHED = {"compile": 143, "math": 134, "memory-efficient": 119, "flash": 113, "padded-vocabulary": 87}
COLUMNS = (50_257, 50_304)
ARTICLE_ROWS = 12


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
class Reasons(Script):
    """Why the figures are what they are on this machine.

    - attention: one layer's alone, of the character model's rows of 256 tokens, with figure 3's micro-batches.
    - operators: where the steps of two rungs of figure 2 go, by torch's profiler: what the calling thread spends in
      each operator itself (compiled code counts as the operator that calls it). The steps of both take turns.
    """

    result = "article-reasons"
    rows: tuple[int, ...] = (1, 20, 30)
    """Numbers of rows of 256 tokens, six heads."""
    rungs: tuple[str, ...] = ("compile", "math")
    """Rungs of figure 2."""
    rounds: int = 4

    def measure(self) -> Report:
        configure()
        attention = [
            {"rows": rows, "tokens": 256} | one
            for rows in self.rows
            for one in layer_attention("cpu", rows, 256, heads=6)
        ]
        return {"attention": attention, "operators": self.operators()}

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


@dataclass(frozen=True, kw_only=True)
class CheckSpeed:
    """Fail if a finished run trained at less than a share of this machine's float32 rate, which is measured now.

    Far below what training reaches, so that other work on the machine does not matter; emulated products and kernels
    whose vectors are on the stack are below it by a factor.
    """

    run_folder: Path
    """Folder of a finished run: recipe.json, train.jsonl, model/."""
    at_least: float = 0.1
    """Share of the float32 rate."""

    def run(self) -> None:
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


def rung_table(report: Report) -> str:
    """Milliseconds of a batch, ours and the article's, each beside the rung before it."""
    known = {row["name"]: row for row in report["rows"] if row.get("milliseconds_per_batch")}
    rows, before, published = [], None, None
    for name, row in known.items():
        theirs = row["published_milliseconds"]
        gain = "" if before is None else f"{_gain(before, row):.2f}×"
        their_gain = "" if not (theirs and published) else f"{published / theirs:.2f}×"
        rows.append(
            [f"`{name}`", row["techniques"][-1], f"{row['milliseconds_per_batch']:,.0f}", gain, f"{row['mfu']:.0%}"]
        )
        rows[-1] += [str(theirs or ""), their_gain]
        before, published = row, theirs
    head = [
        "rung",
        "new in it",
        "ms a batch",
        "to the one before",
        "MFU",
        "the article's ms, A100",
        "to the one before",
    ]
    return markdown(head, rows, left=2)


def _gain(before: dict[str, Any], row: dict[str, Any]) -> float:
    """How much faster than the rung before, the median over the rounds."""
    key = "milliseconds_per_batch"
    return median(a[key] / b[key] for a, b in zip(before["rounds"], row["rounds"], strict=True))


def attention_table(report: Report) -> str:
    """One layer's attention, forward and backward, eager and compiled."""
    found = {(one["kernel"], one["compiled"]): one["seconds"] for one in report["attention"]}
    rows = [
        [f"`{name}`", *(f"{1e3 * found[name, compiled]:,.0f}" for compiled in (False, True))]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return markdown(["one layer, 1,024 tokens", "eager, ms", "compiled, ms"], rows)


def row_table(report: Report) -> str:
    """One layer's attention of figure 3's rows, compiled."""
    found = {(one["rows"], one["kernel"]): one["seconds"] for one in report["attention"] if one["compiled"]}
    counts, kernels = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    rows = [[f"`{name}`", *(f"{1e3 * found[count, name]:.1f}" for count in counts)] for name in kernels]
    return markdown(["one layer, compiled", *(f"{count} × 256 tokens, ms" for count in counts)], rows)


def operator_table(report: Report) -> str:
    """Where the steps of two rungs go; compiled code together."""
    ways = report["operators"]
    sums: dict[str, dict[str, float]] = {}
    for way, found in ways.items():
        for name, took in found["operators"].items():
            kind = "compiled code" if "Compiled" in name else f"`{name.replace('aten::', '')}`"
            own = sums.setdefault(kind, dict.fromkeys(ways, 0.0))
            own[way] += took
    rows = [[kind, *(f"{own[way]:,.0f}" for way in ways)] for kind, own in sums.items()]
    rows.sort(key=lambda row: -float(row[1].replace(",", "")))
    whole = ["a step, not traced", *(f"{found['milliseconds']:,.0f}" for found in ways.values())]
    return markdown(["milliseconds", *(f"`{way}`" for way in ways)], [*rows, whole])


def head_table(report: Report) -> str:
    """The head's product alone."""
    head = report["head"]
    rows = [
        [one["part"], *(f"{1e3 * s:,.1f}" for s in one["seconds"]), f"{one['ratio']:.2f}×"] for one in head["parts"]
    ]
    names = [f"{columns:,} columns, ms" for columns in head["columns"]]
    return markdown([f"{head['rows']:,} rows, {head['dtype']}", *names, "gain"], rows)


TABLES: dict[str, Table] = {
    "article-rungs": rung_table,
    "article-rungs attention": attention_table,
    "article-rungs head": head_table,
    "article-reasons attention": row_table,
    "article-reasons operators": operator_table,
}


if __name__ == "__main__":
    main({"rungs": ArticleRungs, "reasons": Reasons, "check-speed": CheckSpeed}, TABLES)
