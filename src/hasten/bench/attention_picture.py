"""Two pictures of how attention grows with the length, time and memory, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hasten.bench.draw import SOFT, save, style_curves
from hasten.bench.table import format_value, machine_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A colour for each kernel, the same in every picture; explicit kernels dashed.
COLORS = {
    "reference": "#b23a2e",
    "math": "#d07a2d",
    "chunked": "#4d8f5b",
    "flash": "#2f6f9f",
    "memory-efficient": "#8a5a9e",
    "cudnn": "#66717d",
    "flash-triton": "#14919b",
    "native": "#1c2733",
    "flex": "#b5892c",
}
EXPLICIT = ("reference", "math")

Curves = dict[str, tuple[list[int], list[float]]]  # kernel -> tokens, values


def draw_growth(report: Mapping[str, Any], time_path: str | Path, memory_path: str | Path) -> None:
    """Draw both as PNGs. Raises ResourceError if one cannot be written."""
    settings = report["settings"]
    what = "forward and backward" if settings["gradient"] else "forward"
    phase = "forward_backward" if settings["gradient"] else "forward"
    for path, title, key, unit in (
        (time_path, f"Attention, {what}: time", f"{phase}_seconds", "seconds"),
        (memory_path, f"Attention, {what}: peak memory", f"{phase}_peak_bytes", "bytes"),
    ):
        _draw(report, path, title=title, key=key, unit=unit)


def _draw(report: Mapping[str, Any], path: str | Path, *, title: str, key: str, unit: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, facecolor="white")
    axes = figure.add_axes((0.095, 0.12, 0.74, 0.72))
    curves = _curves(report, key)
    for name, values in curves.items():
        style = "--" if name in EXPLICIT else "-"
        color = COLORS.get(name, SOFT)
        axes.plot(*values, style, color=color, linewidth=1.8, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if unit == "bytes" else 10)
    lengths = report["settings"]["lengths"]
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    if unit == "bytes" and curves:
        low, high = axes.get_ylim()
        ticks = [4**i for i in range(10, 25) if low <= 4**i <= high]
        axes.set_yticks(ticks, [format_value(tick, "bytes").replace(".00", "") for tick in ticks])
    axes.minorticks_off()
    _labels(axes, curves, {point["kernel"] for point in report["points"] if "are free" in point.get("skipped", "")})
    _guides(axes, curves)
    y_label = "seconds" if unit == "seconds" else "above the process's own"
    style_curves(axes, title=title, subtitle=_subtitle(report), x_label="tokens", y_label=y_label)
    save(figure, path)


def _curves(report: Mapping[str, Any], key: str) -> Curves:
    curves: Curves = {}
    for point in report["points"]:
        if point.get(key):
            tokens, values = curves.setdefault(point["kernel"], ([], []))
            tokens.append(point["tokens"])
            values.append(point[key])
    return curves


def _labels(axes: Axes, curves: Curves, full: set[str]) -> None:
    """Each curve's name behind its end, or before it where others go on; names that would overlap are moved apart.

    full: curves that end for want of memory.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted((values[-1], tokens[-1], name) for name, (tokens, values) in curves.items())
    longest = max((tokens for _, tokens, _ in ends), default=0)
    placed = [(end, *to_axes.transform(end[1::-1])) for end in ends]  # with where they end, in the picture
    lowest = 0.0
    for (_, tokens, name), place, height in placed:
        if tokens == longest:
            lowest = max(height, lowest)
            _name(axes, name, name, place + 0.02, lowest, "left")
            lowest += 0.045
    count = 0
    for (_, tokens, name), place, height in reversed(placed):
        if tokens != longest:
            text = f"{name} (no memory for more)" if name in full else name
            _name(axes, name, text, place - 0.02 - 0.05 * count, height - 0.045 * count, "right")
            count += 1


def _name(axes: Axes, kernel: str, text: str, x: float, y: float, side: Literal["left", "right"]) -> None:
    axes.text(x, y, text, transform=axes.transAxes, fontsize=9, color=COLORS.get(kernel, SOFT), ha=side, va="center")


def _guides(axes: Axes, curves: Curves) -> None:
    """Thin lines of slope 1 and 2 from the first point of the lowest curve."""
    if not curves:
        return
    tokens = sorted({t for own, _ in curves.values() for t in own})
    start = min(values[0] for _, values in curves.values())
    low, high = axes.get_ylim()
    for power, name in ((1, "linear"), (2, "quadratic")):
        line = [start * (t / tokens[0]) ** power for t in tokens]
        axes.plot(tokens, line, ":", color=SOFT, linewidth=1, zorder=0)
        inside = [i for i, value in enumerate(line) if value <= high]
        last = inside[-1]
        axes.annotate(name, (tokens[last], line[last]), fontsize=7.5, color=SOFT, ha="right", va="bottom")
    axes.set_ylim(low, high)


def _subtitle(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    heads = f"{settings['heads']} heads"
    if settings["kv_heads"] != settings["heads"]:
        heads = f"{settings['heads']}/{settings['kv_heads']} heads"
    causal = "causal" if settings["causal"] else "not causal"
    call = f"{settings['batch']} x {heads} of {settings['head_dim']}, {settings['dtype']}, {causal}"
    return f"{call}; {machine_line(report['machine'], settings['device'])}"
