"""Two pictures of how attention grows with the length, time and memory, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.measure.draw import SOFT, curve_axes
from hasten.measure.table import format_value, machine_line

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


def draw_growth(report: Mapping[str, Any], time_path: str | Path, memory_path: str | Path) -> None:
    """Draw both as PNGs. Raises ResourceError if one cannot be written."""
    settings = report["settings"]
    phase = "forward_backward" if settings["gradient"] else "forward"
    heads = str(settings["heads"])
    if settings["kv_heads"] != settings["heads"]:
        heads += f"/{settings['kv_heads']}"
    causal = "causal" if settings["causal"] else "not causal"
    call = f"{settings['batch']} x {heads} heads of {settings['head_dim']}, {settings['dtype']}, {causal}"
    words = {"subtitle": f"{call}; {machine_line(report['machine'], settings['device'])}", "x_label": "tokens"}
    title = f"Attention, {phase.replace('_', ' and ')}"
    with curve_axes(time_path, title=f"{title}: time", y_label="seconds", **words) as axes:
        _plot(axes, report, f"{phase}_seconds", base=10)
    with curve_axes(memory_path, title=f"{title}: peak memory", y_label="above the process's own", **words) as axes:
        _plot(axes, report, f"{phase}_peak_bytes", base=4)
        axes.yaxis.set_major_formatter(lambda value, _: format_value(value, "bytes").replace(".00", ""))


def _plot(axes: Axes, report: Mapping[str, Any], key: str, *, base: int) -> None:
    """A curve for each kernel, and thin lines of slope 1 and 2 from the first point of the lowest one."""
    full = {point["kernel"] for point in report["points"] if "are free" in point.get("skipped", "")}
    curves: dict[str, dict[int, float]] = {}
    for point in report["points"]:
        if point.get(key):
            curves.setdefault(point["kernel"], {})[point["tokens"]] = point[key]
    for name, curve in curves.items():
        style, color = "--" if name in EXPLICIT else "-", COLORS.get(name, SOFT)
        label = f"{name} (no memory for more)" if name in full else name
        axes.plot(*zip(*curve.items(), strict=True), style, label=label, color=color, linewidth=1.8, marker="o")
    lengths = report["settings"]["lengths"]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=base)
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axes.minorticks_off()
    if not curves:
        return
    tokens = sorted({tokens for curve in curves.values() for tokens in curve})
    start, high = min(next(iter(curve.values())) for curve in curves.values()), axes.get_ylim()[1]
    for power, name in ((1, "linear"), (2, "quadratic")):
        line = [(t, start * (t / tokens[0]) ** power) for t in tokens]
        inside = [(t, value) for t, value in line if value <= high]
        axes.plot(*zip(*inside, strict=True), ":", color=SOFT, linewidth=1, zorder=0)
        axes.annotate(name, inside[-1], fontsize=7.5, color=SOFT, ha="right", va="bottom")
