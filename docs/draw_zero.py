"""Draws what a rank holds at each stage of ZeRO, by formula and measured: docs/zero.png.

    python docs/draw_zero.py [FILE]

Measured: benchmarks/results/zero-bytes.json. The formulas are those of `hasten.planning.sharing`.
"""

import json
import sys
from pathlib import Path

from matplotlib.axes import Axes

from hasten.measure.draw import BAR, FAILED, INK, picture
from hasten.planning.cost import parameters
from hasten.planning.devices import known_device
from hasten.planning.shapes import shape_config
from hasten.planning.sharing import fsdp_bytes

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "zero-bytes.json"
PARTS = {"weights": BAR, "optimizer's states": "#8db4cf", "gradients and gathered weights, at the peak": "#e3e9ef"}
STAGES = range(4)
RANKS, LARGE_RANKS = 4, 8


def stacked(axes: Axes, stage: int, weights: float, states: float, peak: float) -> None:
    below = 0.0
    for height, color in zip((weights, states, peak - weights - states), PARTS.values(), strict=True):
        axes.bar(stage, height, 0.6, bottom=below, color=color)
        below += height


def draw_measured(axes: Axes) -> None:
    """Bytes a parameter of the model that was measured."""
    for row in json.loads(RESULT.read_text())["rows"]:
        if row["ranks"] != RANKS or {"accumulation", "policy", "offload", "replicas", "experts"} & set(row):
            continue
        stage, count, formula = row["zero"], row["parameters"], row["formula"]
        states = 8 / (RANKS if stage else 1)
        stacked(axes, stage, formula["start"] / count, states, formula["peak"] / count)
        axes.plot(stage, row["held"]["peak"] / count, "o", color=INK, markersize=6)
        axes.plot(stage, row["paper"] / count, "_", color=FAILED, markersize=34, markeredgewidth=2)
    axes.set(title=f"measured: a small model on {RANKS} ranks", ylabel="bytes a parameter, on each rank")


def draw_large(axes: Axes) -> None:
    """GB of a model of 7 billion parameters."""
    config, free = shape_config("llama-7b"), known_device("h100").memory / 1e9
    for stage in STAGES:
        held = fsdp_bytes(config, stage=stage, ranks=LARGE_RANKS)
        states = 8 * parameters(config).total / (LARGE_RANKS if stage else 1)
        stacked(axes, stage, held.start / 1e9, states / 1e9, held.peak / 1e9)
        axes.text(stage, held.peak / 1e9 + 1, f"{held.peak / 1e9:.0f}", ha="center", fontsize=9, color=INK)
    axes.axhline(free, color=FAILED, lw=1.2, ls="--")
    axes.text(3.4, free + 1, "one H100", ha="right", fontsize=8.5, color=FAILED)
    axes.set(title=f"planned: Llama 7B on {LARGE_RANKS} ranks, without activations", ylabel="GB on each rank")


def draw(path: Path) -> None:
    with picture(path, title="Memory of ZeRO's stages", size=(10.4, 4.4)) as figure:
        left, right = figure.subplots(1, 2)
        draw_measured(left)
        draw_large(right)
        for axes in (left, right):
            axes.set_xticks(STAGES, ["0 (DDP)", "1", "2", "3"])
            axes.set_xlabel("--parallel.zero")
            axes.grid(visible=False, axis="x")
        for name, color in PARTS.items():
            left.bar(0, 0, color=color, label=name)
        left.plot([], [], "o", color=INK, label="measured at the peak")
        left.plot([], [], "_", color=FAILED, markersize=14, markeredgewidth=2, label="the paper's formula")
        figure.legend(loc="outside lower left", ncols=5, fontsize=8)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "zero.png")
