"""Two pictures of how attention grows with the length, time and memory, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.bench.draw import SOFT, curve_axes
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
    curves, lengths = _curves(report, key), report["settings"]["lengths"]
    full = {point["kernel"] for point in report["points"] if "are free" in point.get("skipped", "")}
    y_label = "seconds" if unit == "seconds" else "above the process's own"
    with curve_axes(path, title=title, subtitle=_subtitle(report), x_label="tokens", y_label=y_label) as axes:
        for name, values in curves.items():
            style = "--" if name in EXPLICIT else "-"
            label = f"{name} (no memory for more)" if name in full else name
            color = COLORS.get(name, SOFT)
            axes.plot(*values, style, label=label, color=color, linewidth=1.8, marker="o", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        axes.set_yscale("log", base=4 if unit == "bytes" else 10)
        if unit == "bytes":
            axes.yaxis.set_major_formatter(lambda value, _: format_value(value, "bytes").replace(".00", ""))
        axes.minorticks_off()
        _guides(axes, curves)


def _curves(report: Mapping[str, Any], key: str) -> Curves:
    curves: Curves = {}
    for point in report["points"]:
        if point.get(key):
            tokens, values = curves.setdefault(point["kernel"], ([], []))
            tokens.append(point["tokens"])
            values.append(point[key])
    return curves


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
