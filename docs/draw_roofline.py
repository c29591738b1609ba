"""Draws kernels under the rooflines of the machines that ran them: docs/roofline.png.

    python docs/draw_roofline.py [FILE]

The numbers are those of benchmarks/results: linear.json and prefill-attention.json (inference, two threads), and
profile-demo-train.json (a training step, one thread).
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from hasten.measure.draw import INK, LINES, SOFT, picture

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FORMATS = {"bfloat16": "float", "int8": "int8", "int4": "int8"}  # weights, and activations of the product
LABELLED = (1, 4, 16, 64, 512)  # rows
PARTS = {  # of the training step: how their names in the profile end
    "attention": "attention.itself",
    "q, k and v": "attention.project",
    "attention's output": "attention.output",
    "MLP": "mlp",
    "head and loss": "model.head",
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def roof(axes: Axes, bandwidth: float, rate: float, name: str, color: str) -> None:
    """The most operations per second at each intensity. bandwidth: GB/s; rate: GFLOP/s."""
    low, high = axes.get_xlim()
    axes.plot([low, rate / bandwidth, high], [bandwidth * low, rate, rate], color=color, lw=1.2, ls="--", marker="")
    axes.text(high, rate * 1.06, f"{name}  ", color=color, ha="right", va="bottom", fontsize=8)


def draw_inference(axes: Axes) -> None:
    rows = read("linear")["rows"]
    axes.set(title="Inference: products of packed weights, and attention of prompts", xlim=(0.7, 8000), ylim=(40, 3500))
    axes.set(xlabel="operations per byte of memory", ylabel="GFLOP/s or GOP/s")
    bandwidth = rows[0]["read_gb_per_second"]
    for name, color in (("bfloat16", LINES[0]), ("int8", LINES[1])):
        rate = next(row["matrix_giga_operations_per_second"] for row in rows if row["format"] == name)
        roof(axes, bandwidth, rate, f"{name}: {rate:,.0f} a second", color)
    axes.text(1.0, bandwidth * 1.3, f"memory: {bandwidth:.0f} GB/s", rotation=36, color=SOFT, fontsize=8)
    for (name, activations), color in zip(FORMATS.items(), LINES, strict=False):
        own = [row for row in rows if (row["format"], row["activations"]) == (name, activations)]
        rates = [row["giga_operations_per_second"] for row in own]
        dense = [rate / row["gb_per_second"] for rate, row in zip(rates, own, strict=True)]
        axes.plot(dense, rates, "o-", color=color, lw=0.8, markersize=4.5, label=f"{name} weights, by rows")
        for row, x, y in zip(own, dense, rates, strict=True):
            if row["rows"] in LABELLED and name == "bfloat16":
                axes.annotate(str(row["rows"]), (x, y), (4, -9), textcoords="offset points", fontsize=8, color=color)
    for one in read("prefill-attention")["rows"]:
        tokens, heads, kv_heads, size = (one[key] for key in ("tokens", "heads", "kv_heads", "head_dim"))
        moved = 2 * tokens * size * (2 * heads + 2 * kv_heads)  # queries and outputs, keys and values, in bfloat16
        flops = 4 * heads * size * tokens * (tokens + 1) / 2
        rate, label = one["flops_per_second"] / 1e9, "attention of a prompt, bfloat16"
        shown = {*axes.get_legend_handles_labels()[1]}
        axes.plot(flops / moved, rate, "s", color=LINES[3], markersize=5, label=None if label in shown else label)
    axes.legend(loc="lower right", fontsize=8)


def draw_training(axes: Axes) -> None:
    phase = read("profile-demo-train")["phases"][0]
    bandwidth, rate = phase["limits"]["bandwidth"] / 1e9, phase["limits"]["rates"]["bfloat16"] / 1e9
    axes.set(title="A training step: parts of a Llama shape of 10 M parameters", xlim=(0.7, 8000), ylim=(15, 400))
    axes.set(xlabel="FLOPs per byte of memory", ylabel="GFLOP/s")
    roof(axes, bandwidth, rate, f"bfloat16: {rate:,.0f} a second", LINES[0])
    axes.text(0.9, bandwidth * 1.1, f"memory: {bandwidth:.0f} GB/s", rotation=38, color=SOFT, fontsize=8)
    for (name, end), color in zip(PARTS.items(), LINES[1:], strict=False):
        own = [row for row in phase["rows"] if row["name"] == end or row["name"].endswith(f".{end}")]
        flops, moved = (sum(row[key] for row in own) for key in ("flops", "bytes"))
        reached = flops / sum(row["forward"] + row["backward"] for row in own) / 1e9
        axes.plot(flops / moved, reached, "o", color=color, markersize=7, label=f"{name}: {reached:.0f} GFLOP/s")
    axes.legend(loc="lower right", fontsize=8)


def draw(path: Path) -> None:
    with picture(path, title="Kernels under the roofline", size=(11, 4.4)) as figure:
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
            axes.tick_params(labelcolor=INK)
        draw_inference(left)
        draw_training(right)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "roofline.png")
