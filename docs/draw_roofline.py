"""Draws kernels under the rooflines of the machines that ran them: docs/roofline.png.

    python docs/draw_roofline.py [FILE]

The numbers are those of benchmarks/results: linear.json and prefill-attention.json (inference, two threads), and
profile-demo-train.json (a training step, one thread).
"""

import json
import sys
from collections.abc import Sequence
from math import atan, degrees
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from hasten.measure.draw import INK, LINES, SOFT, picture

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FORMATS = {"bfloat16": "float", "int8": "int8", "int4": "int8"}  # weights, and activations of the product
LABELLED = (1, 4, 16, 64, 512)  # rows
PARTS = {  # of the training step: how their names in the profile end
    "attention": (".attention.itself",),
    "its projections": (".attention.project", ".attention.output"),
    "MLP": (".mlp",),
    "head and loss": ("model.head",),
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def scales(axes: Axes, title: str, y_label: str, ticks: Sequence[int]) -> None:
    """Logarithmic scales with plain numbers: operations per byte, and billions of them per second."""
    axes.set(xscale="log", yscale="log", xlim=(0.7, 8000), ylim=(0.7 * ticks[0], 1.6 * ticks[-1]))
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"], color=INK)
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks], color=INK)
    axes.minorticks_off()
    axes.set(title=title, xlabel="operations per byte of memory", ylabel=y_label)


def roof(axes: Axes, bandwidth: float, rates: dict[str, float]) -> None:
    """The most operations per second at each intensity. bandwidth: GB/s; rates: of each dtype, GFLOP/s."""
    low, high = axes.get_xlim()
    for (name, rate), color in zip(rates.items(), LINES, strict=False):
        axes.plot([low, rate / bandwidth, high], [bandwidth * low, rate, rate], color=color, lw=1.2, ls="--", marker="")
        axes.text(high, rate * 1.13, f"{name}: {rate:,.0f} a second  ", color=color, ha="right", fontsize=8)
    x, y = 1.3, 1.8 * bandwidth  # of a label along the slope, a little above it
    along = {"rotation": degrees(atan(y / x)), "rotation_mode": "anchor", "transform_rotates_text": True}
    axes.text(x, y, f"memory: {bandwidth:.0f} GB/s", color=SOFT, fontsize=8, **along)


def draw_inference(axes: Axes) -> None:
    rows = read("linear")["rows"]
    title = "Inference: products of packed weights, and attention of prompts"
    scales(axes, title, "GFLOP/s, of integers GOP/s", (50, 100, 200, 500, 1000, 2000))
    rates = {row["format"]: row["matrix_giga_operations_per_second"] for row in rows if row["rows"] == 1}
    roof(axes, rows[0]["read_gb_per_second"], {name: rates[name] for name in ("bfloat16", "int8")})
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
    scales(axes, "A training step: parts of a Llama shape of 10 M parameters", "GFLOP/s", (20, 50, 100, 200))
    roof(axes, bandwidth, {"bfloat16": rate})
    for (name, ends), color in zip(PARTS.items(), LINES[1:], strict=False):
        own = [row for row in phase["rows"] if row["name"].endswith(ends)]
        flops, moved = (sum(row[key] for row in own) for key in ("flops", "bytes"))
        reached = flops / sum(row["forward"] + row["backward"] for row in own) / 1e9
        axes.plot(flops / moved, reached, "o", color=color, markersize=7, label=f"{name}: {reached:.0f} GFLOP/s")
    axes.legend(loc="lower right", fontsize=8)


def draw(path: Path) -> None:
    with picture(path, title="Kernels under the roofline", size=(10.4, 4.2)) as figure:
        left, right = figure.subplots(1, 2)
        draw_inference(left)
        draw_training(right)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "roofline.png")
