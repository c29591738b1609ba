"""What sparse attention costs, and what it gives.

    python benchmarks/sparse.py attention --output benchmarks/results/sparse-attention.json
    python benchmarks/sparse.py perplexity --output benchmarks/results/sparse-perplexity.json

Everything takes turns in every round; ratios are formed within a round, and medians are over the rounds.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from hasten.data import Batch
from hasten.measure.draw import draw_curves
from hasten.measure.script import Report, Table, TimedScript, main, markdown
from hasten.measure.timing import timed
from hasten.measure.workers import last_json
from hasten.ops.attention import attention
from hasten.ops.attention import patterns as kinds
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.pattern_layout import Pattern
from hasten.ops.attention.patterns import BigBird, BSLongformer, Causal, Fixed, Local, Strided
from hasten.training import RECIPES, Recipe, TrainStep, train
from hasten.training.setup import set_up

DENSE, FLASH = "dense (native)", "dense (PyTorch's flash)"
TARGET = 1.5  # times density times the time of PyTorch's flash

LITTLE_MEMORY = """
import json, resource, sys
import torch
from hasten.machine import peak_memory, process_memory
from hasten.ops.attention import attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.patterns import BigBird

kernel, tokens, heads, head_dim, block, limit = sys.argv[1], *map(int, sys.argv[2:])


def step(tokens):
    q, k, v = (torch.randn(1, tokens, heads, head_dim).bfloat16().requires_grad_() for _ in range(3))
    mask = BlockMask.of(BigBird(block=block), tokens)
    attention(q, k, v, block_mask=mask, kernel=kernel).sum().backward()
    return q.grad is not None


step(64)
baseline = process_memory()
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + limit, size + limit))
try:
    done = step(tokens)
except (MemoryError, RuntimeError) as error:
    print(json.dumps({"trained": False, "error": str(error).splitlines()[0][:200]}))
else:
    print(json.dumps({"trained": done, "peak_bytes": peak_memory() - baseline}))
"""


@dataclass(frozen=True, kw_only=True)
class SparseAttention(TimedScript):
    """Density against time: how near block-sparse attention comes to costing its share of dense attention.

    Every pattern, our dense causal attention and PyTorch's flash are measured in turn in every round, forward, and
    forward with backward; a pattern's ratio is its time over density times the dense time of the same round. The target
    for the forward pass is at most 1.5 times density times the time of PyTorch's flash. Then one call over 16,384
    tokens, forward and backward, is made in processes that may allocate no more than a stated memory.
    """

    result = "sparse-attention"
    tokens: int = 8192
    """Tokens of the timed calls."""
    heads: int = 8
    """Query and key/value heads."""
    head_dim: int = 64
    """Elements of a head."""
    block: int = 64
    """Positions of a block."""
    rounds: int = 5
    """Interleaved rounds."""
    long_tokens: int = 16384
    """Tokens of the training step in little memory; 0: leave it out."""
    memory_mb: int = 1024
    """What that step may allocate, in MB (2^20 bytes)."""

    def measure(self) -> Report:
        torch.manual_seed(0)
        rows = pattern_rows(self)
        worst = max(row["forward_over_share_of_flash"] for row in rows if "pattern" in row)
        print(f"forward at most {worst:.2f} times density times flash; the target is {TARGET}")
        found = {"settings": self.settings() | {"dtype": "bfloat16"}, "limit": TARGET, "rows": rows}
        found |= {"worst_over_share_of_flash": worst, "met": worst <= TARGET}
        if self.long_tokens:
            found["memory"] = in_little_memory(self)
            print(*found["memory"]["rows"], sep="\n")
        if self.output is not None:
            draw_density(found, self.output.with_suffix(".png"))
        return found


def patterns(block: int, tokens: int) -> dict[str, Pattern]:
    """What is measured, from sparse to dense."""
    blocks = tokens // block
    return {
        "Local, radius 1": Local(block=block, radius=1),
        "SlidingWindow, window 5": kinds.SlidingWindow(block=block, window=5),
        "Atrous, every 16th position": kinds.Atrous(block=1, stride=16),
        "BSLongformer, window 5": BSLongformer(block=block, window=5),
        "BigBird, window 3, 2 random": BigBird(block=block, random_blocks=2),
        "BigBird, window 9, 8 random": BigBird(block=block, window=9, random_blocks=8, global_blocks=2),
        "Variable, windows 1, 2, 4, 1 random": kinds.Variable(block=block, windows=(1, 2, 4), random_blocks=1),
        "Atrous, every 5th position": kinds.Atrous(block=1, stride=5),
        "Fixed, windows of 8": Fixed(block=block, local_blocks=8),
        "Atrous, every 4th block": kinds.Atrous(block=block, stride=4),
        "Strided, radius 4, every 4th": Strided(block=block, radius=4, stride=4),
        f"Local, radius {blocks // 3}": Local(block=block, radius=blocks // 3),
        "Causal": Causal(block=block),
    }


def pattern_rows(settings: SparseAttention) -> list[dict[str, Any]]:
    """One row a pattern, and one for each dense attention."""
    shape = (1, settings.tokens, settings.heads, settings.head_dim)
    q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for _ in range(3))
    upstream = torch.randn(shape).bfloat16()
    found = patterns(settings.block, settings.tokens)
    masks = {name: BlockMask.of(pattern, settings.tokens) for name, pattern in found.items()}

    def flash() -> torch.Tensor:
        q4, k4, v4 = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q4, k4, v4, is_causal=True).transpose(1, 2)

    calls: dict[str, Callable[[], torch.Tensor]] = {FLASH: flash, DENSE: lambda: attention(q, k, v, kernel="native")}
    for name, mask in masks.items():
        calls[name] = lambda mask=mask: attention(q, k, v, block_mask=mask)  # type: ignore[misc]
    seconds: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in calls}
    for number in range(settings.rounds + 1):
        for name, call in calls.items():
            with torch.no_grad():
                forward = timed(call)
            both = timed(lambda call=call: torch.autograd.grad(call(), (q, k, v), upstream))  # type: ignore[misc]
            if number:  # the first round warms up
                seconds[name]["forward"].append(forward)
                seconds[name]["both"].append(both)
    pairs = settings.tokens * (settings.tokens + 1) // 2
    rows = []
    for name in calls:
        density = masks[name].layout.density if name in masks else 1.0
        row: dict[str, Any] = {"name": name, "density": density}
        if name in found:
            row["pattern"] = found[name].render(8).splitlines()[1:]
        for phase, products in (("forward", 2), ("both", 7)):
            own, dense, other = (seconds[key][phase] for key in (name, DENSE, FLASH))
            row[f"{phase}_seconds"] = median(own)
            row[f"{phase}_over_share_of_dense"] = median(a / (density * b) for a, b in zip(own, dense, strict=True))
            row[f"{phase}_over_share_of_flash"] = median(a / (density * b) for a, b in zip(own, other, strict=True))
            if name not in found:
                operations = products * 2 * settings.heads * settings.head_dim * pairs
                row[f"{phase}_gflops_per_second"] = operations / median(own) / 1e9
        row["rounds"] = seconds[name]
        rows.append(row)
    return rows


def in_little_memory(settings: SparseAttention) -> dict[str, Any]:
    """Whether a call over many tokens, forward and backward, fits: sparse, and with explicit scores."""
    limit = settings.memory_mb << 20
    rows = []
    for kernel in ("native-sparse", "reference"):
        sizes = (settings.long_tokens, settings.heads, settings.head_dim, settings.block, limit)
        command = [sys.executable, "-c", LITTLE_MEMORY, kernel, *map(str, sizes)]
        rows.append({"kernel": kernel} | last_json(command))
    scores = 4 * settings.heads * settings.long_tokens**2
    return {"tokens": settings.long_tokens, "limit_bytes": limit, "score_matrix_bytes": scores, "rows": rows}


def draw_density(result: dict[str, Any], path: Path) -> None:
    """Time over density; the dense ones as dots at 100%."""
    own = sorted((row for row in result["rows"] if "pattern" in row), key=lambda row: row["density"])
    density = [100 * row["density"] for row in own]
    dense = {row["name"]: row for row in result["rows"] if "pattern" not in row}
    series: dict[str, tuple[list[float], list[float]]] = {}
    for phase, name in (("forward", "forward"), ("both", "forward + backward")):
        series[f"sparse, {name}"] = (density, [row[f"{phase}_seconds"] * 1000 for row in own])
        series[f"PyTorch's flash, {name}"] = ([100.0], [dense[FLASH][f"{phase}_seconds"] * 1000])
    settings = result["settings"]
    draw_curves(
        series,
        path,
        title="Sparse attention on a CPU costs its density",
        subtitle=f"{settings['tokens']:,} tokens, {settings['heads']} heads of {settings['head_dim']}, bfloat16, "
        f"{settings['threads']} threads; medians of {settings['rounds']} interleaved rounds",
        x_label="blocks seen, % of dense causal attention",
        y_label="ms",
    )


TRAINED: dict[str, str | None] = {
    "dense": None,
    "BigBird, window 3, 1 random": "bigbird",
    "Strided, radius 1, every 4th": "strided",
    "Local, radius 3": "local:radius=3",
}


@dataclass(frozen=True, kw_only=True)
class SparsePerplexity(TimedScript):
    """Perplexity and speed of sparse patterns beside dense attention, on Python's library.

    The same small model (the recipe demo with other sizes) is trained with each pattern on the same batches of 2,048
    tokens, to the same number of tokens; perplexity is that of the held-out text at the end. Interrupted, it goes on
    where it was. Then steps and forward passes of all models are timed in turn, in interleaved rounds.
    """

    result = "sparse-perplexity"
    steps: int = 300
    """Optimizer steps of each, of 2 x 2,048 tokens."""
    rounds: int = 7
    """Interleaved rounds of the timing."""
    folder: Path = Path("runs/sparse")
    """Where the runs are."""
    only: int | None = None
    """Train the pattern of this number only, and measure nothing."""

    def measure(self) -> Report:
        losses = {}
        for number, (name, pattern) in enumerate(TRAINED.items()):
            if self.only in (None, number):
                losses[name] = train(recipe_of(self, number, pattern), progress=True).validation_loss
        if self.only is not None:
            return {"rows": []}
        what = "recipe demo with 4 layers, 192 wide, 3 heads, rows of 2,048 tokens of Python's library, bfloat16"
        return {"what": what, "rows": training_rows(self, losses)}


def recipe_of(settings: SparsePerplexity, number: int, pattern: str | None) -> Recipe:
    """The recipe demo, smaller, with long rows."""
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


def training_rows(settings: SparsePerplexity, losses: dict[str, float]) -> list[dict[str, Any]]:
    """One row a pattern."""
    steps: dict[str, TrainStep] = {}
    batch: Batch | None = None
    for number, (name, pattern) in enumerate(TRAINED.items()):
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
            "pattern": TRAINED[name],
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


def perplexity_table(report: Report) -> str:
    """`sparse.py perplexity`."""
    rows = []
    for one in report["rows"]:
        cells = [one["name"], f"{one['density']:.0%}", f"{one['perplexity']:.1f}"]
        for part in ("step", "forward"):
            cells += [f"{one[f'{part}_tokens_per_second']:,.0f}", f"{one[f'{part}_speed_over_dense']:.2f}×"]
        rows.append(cells)
    head = ["attention", "blocks", "perplexity", "training, tokens/s", "of dense", "forward, tokens/s", "of dense"]
    return markdown(head, rows)


def attention_table(report: Report) -> str:
    """`sparse.py attention`."""
    rows = []
    for one in report["rows"]:
        cells = [one["name"], f"{one['density']:.1%}"]
        for part in ("forward", "both"):
            cells.append(f"{one[f'{part}_seconds'] * 1e3:.0f} ms")
            cells += [f"{one[f'{part}_over_share_of_{whole}']:.2f}" for whole in ("flash", "dense")]
        rows.append(cells)
    shares = ["÷ d·flash", "÷ d·native"]
    return markdown(["pattern", "blocks, d", "forward", *shares, "with backward", *shares], rows)


TABLES: dict[str, Table] = {
    "sparse-attention": attention_table,
    "sparse-perplexity": perplexity_table,
}


if __name__ == "__main__":
    main({"attention": SparseAttention, "perplexity": SparsePerplexity}, TABLES)
