"""Density against time: how near block-sparse attention comes to costing its share of dense attention.

    python benchmarks/sparse_attention.py --output benchmarks/results/sparse-attention.json

Every pattern, our dense causal attention and PyTorch's flash are measured in turn in every round, forward, and forward
with backward; a pattern's ratio is its time over density times the dense time of the same round, medians over the
rounds. Target: the forward pass at most 1.5 times density times the time of PyTorch's flash. Then
one call over 16,384 tokens, forward and backward, is made in processes that may allocate no more than a stated memory.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from timing import timed

if TYPE_CHECKING:
    from hasten.ops.attention.pattern_layout import Pattern

DENSE, FLASH = "dense (native)", "dense (PyTorch's flash)"
LIMIT = 1.5  # times density times the time of PyTorch's flash

CHILD = """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttention:
    """Measure sparse patterns against dense attention."""

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

    threads: int = 2
    """Threads of torch."""

    long_tokens: int = 16384
    """Tokens of the training step in little memory; 0: leave it out."""

    memory_mb: int = 1024
    """What that step may allocate, in MB (2^20 bytes)."""

    output: Path | None = None
    """Where to write the JSON; the picture goes beside it."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        result: dict[str, Any] = {
            "schema": 1,
            "machine": describe().to_json(),
            "settings": {
                "tokens": self.tokens,
                "heads": self.heads,
                "head_dim": self.head_dim,
                "block": self.block,
                "dtype": "bfloat16",
                "threads": self.threads,
                "rounds": self.rounds,
            },
            "limit": LIMIT,
            "rows": measured(self),
        }
        print(table(result["rows"]))
        worst = max(row["forward_over_share_of_flash"] for row in result["rows"] if "pattern" in row)
        result["worst_over_share_of_flash"], result["met"] = worst, worst <= LIMIT
        print(f"forward at most {worst:.2f} times density times flash; the target is {LIMIT}")
        if self.long_tokens:
            result["memory"] = in_little_memory(self)
            for row in result["memory"]["rows"]:
                print(row)
        if self.output is not None:
            write_json(self.output, result)
            draw(result, self.output.with_suffix(".png"))


def patterns(block: int, tokens: int) -> "dict[str, Pattern]":
    """What is measured, from sparse to dense."""
    from hasten.ops.attention import patterns as kinds
    from hasten.ops.attention.patterns import BigBird, BSLongformer, Causal, Fixed, Local, Strided

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


def measured(settings: SparseAttention) -> list[dict[str, Any]]:
    """One row a pattern, and one for each dense attention."""
    import torch
    import torch.nn.functional as F

    from hasten.ops.attention import attention
    from hasten.ops.attention.block_mask import BlockMask

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
        command = [sys.executable, "-c", CHILD, kernel, *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the process of {kernel} failed:\n{done.stderr}")
        rows.append({"kernel": kernel} | json.loads(done.stdout))
    scores = 4 * settings.heads * settings.long_tokens**2
    return {"tokens": settings.long_tokens, "limit_bytes": limit, "score_matrix_bytes": scores, "rows": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| pattern | density | forward | ÷ d·flash | ÷ d·ours | with backward | ÷ d·flash | ÷ d·ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["name"], f"{row['density']:.1%}"]
        for phase in ("forward", "both"):
            cells.append(f"{row[f'{phase}_seconds'] * 1000:.0f} ms")
            cells += [f"{row[f'{phase}_over_share_of_{other}']:.2f}" for other in ("flash", "dense")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Time over density; the dense ones as dots at 100%."""
    from hasten.measure.draw import draw_curves

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


if __name__ == "__main__":
    import tyro

    tyro.cli(SparseAttention).run()
