"""Pictures: a ladder as horizontal bars, and curves such as the loss of a training run.

Drawn with matplotlib's objects and its Agg canvas, never through pyplot: no global state, no window, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.bench.report import speed_metric
from hasten.bench.table import cell, format_value, limits_line, machine_line
from hasten.errors import ResourceError
from hasten.machine.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#1c2733", "#66717d", "#e4e8ec"
BAR, BAR_FIRST, BAR_FURTHER, FAILED = "#2f6f9f", "#a9b8c6", "#8db4cf", "#b23a2e"
LINES = ("#2f6f9f", "#d07a2d", "#4d8f5b", "#8a5a9e", "#b23a2e", "#66717d")
TITLES = {"generate": ("Generation", "decode, tokens/s"), "train": ("Training", "tokens/s")}


def draw_ladder(report: Mapping[str, Any], path: str | Path, *, title: str | None = None) -> None:
    """Draws a report as a PNG: one bar a rung with its speed, speed-up and utilisation; the machine underneath.

    The thin line over a bar goes from the slowest to the fastest round. Raises ResourceError if it cannot be written.
    """
    from matplotlib.figure import Figure

    rows = report["rows"]
    kind = report["kind"]
    speed = speed_metric(kind)
    heading, unit = TITLES[kind]
    height = 1.55 + 0.52 * len(rows)
    figure = Figure(figsize=(9.6, height), dpi=150, facecolor="white")
    # Rung names are as wide as they are; everything else is in the same place whatever the number of rungs.
    left = 0.05 + 0.0088 * max(len(row["name"]) for row in rows)
    axes = figure.add_axes((left, 0.72 / height, 0.97 - left, 1 - 1.5 / height))
    worked = [row for row in rows if "error" not in row and row.get(speed) is not None]
    widest = max((row["max"].get(speed, row[speed]) if "max" in row else row[speed] for row in worked), default=1.0)
    caches = len({row["cache_bytes_per_token"] for row in worked if "cache_bytes_per_token" in row})
    axes.set_xlim(0, widest * (1.75 if caches > 1 else 1.5))  # room for what is written behind the bars
    for position, row in enumerate(rows):
        if "error" in row or row.get(speed) is None:
            _text(axes, 0, position, f" {_shorten(str(row.get('error', 'no speed measured')))}", FAILED)
            continue
        _bar(axes, position, row, speed, first=row is worked[0], cache=caches > 1)
    _style_bars(axes, [row["name"] for row in rows], unit)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= widest * 1.05])
    axes.axvline(0, color=SOFT, linewidth=1)
    _headings(figure, height, report, title or f"{heading} ladder")
    save(figure, path)


def draw_curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: str | Path,
    *,
    title: str = "",
    subtitle: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draws named curves (x values, y values) into one PNG; a curve of one point becomes a dot.

    Raises ResourceError if it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, facecolor="white")
    axes = figure.add_axes((0.085, 0.13, 0.885, 0.71))
    for index, (name, (x, y)) in enumerate(series.items()):
        assert len(x) == len(y), f"{name}: {len(x)} x values and {len(y)} y values"
        marker = "o" if len(x) < 12 else None
        axes.plot(x, y, label=name, color=LINES[index % len(LINES)], linewidth=1.6, marker=marker, markersize=4)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    style_curves(axes, title=title, subtitle=subtitle, x_label=x_label, y_label=y_label)
    save(figure, path)


def style_curves(axes: Axes, *, title: str, subtitle: str, x_label: str, y_label: str) -> None:
    """What all pictures of curves share: two thin axes, a faint grid, title and subtitle above."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, labelcolor=SOFT, length=0)
    axes.set_xlabel(x_label, fontsize=9.5, color=SOFT)
    axes.set_ylabel(y_label, fontsize=9.5, color=SOFT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GRID)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.text(0.03, 0.94, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.03, 0.885, subtitle, fontsize=9, color=SOFT, va="center")


def draw_bars(
    values: Mapping[str, float], path: str | Path, *, title: str = "", subtitle: str = "", x_label: str = ""
) -> None:
    """Draws named values as horizontal bars into one PNG, the first one lighter, each with its ratio to the first.

    Raises ResourceError if it cannot be written.
    """
    from matplotlib.figure import Figure

    height = 1.35 + 0.52 * len(values)
    figure = Figure(figsize=(8, height), dpi=150, facecolor="white")
    left = 0.05 + 0.0106 * max(map(len, values))
    axes = figure.add_axes((left, 0.5 / height, 0.97 - left, 1 - 1.25 / height))
    first = next(iter(values.values()))
    for position, value in enumerate(values.values()):
        axes.barh(position, value, height=0.62, color=BAR if position else BAR_FIRST)
        ratio = f"  ({format_value(value / first, 'times')})" if position and first else ""
        _text(axes, value, position, f" {value:,.0f}{ratio}", INK, bold=True)
    axes.set_xlim(0, max(values.values(), default=1.0) * 1.25 or 1.0)
    _style_bars(axes, list(values), x_label)
    figure.text(0.03, 1 - 0.28 / height, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.03, 1 - 0.55 / height, subtitle, fontsize=9, color=SOFT, va="center")
    save(figure, path)


def _style_bars(axes: Axes, names: Sequence[str], unit: str) -> None:
    """Axes of horizontal bars, the first one on top: their names, no frame, a faint grid of the values."""
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names, fontsize=10, color=INK)
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor=SOFT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(unit, fontsize=9, color=SOFT, loc="left")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _bar(axes: Axes, position: int, row: Mapping[str, Any], speed: str, *, first: bool, cache: bool) -> None:
    value = row[speed]
    color = BAR_FIRST if first else BAR_FURTHER if "ratio_to" in row else BAR
    axes.barh(position, value, height=0.62, color=color)
    low, high = row.get("min", {}).get(speed, value), row.get("max", {}).get(speed, value)
    if high > low:
        axes.plot((low, high), (position, position), color=INK, linewidth=1.1, solid_capstyle="butt", alpha=0.75)
        for end in (low, high):
            axes.plot((end, end), (position - 0.1, position + 0.1), color=INK, linewidth=1.1, alpha=0.75)
    label = format_value(value, "speed")
    if row.get("speedup") is not None:
        label += f"  ({format_value(row['speedup'], 'times')})"
    if row.get("ratio") is not None:
        label += f"  ({cell(row, 'ratio', 'times')})"
    text = _text(axes, max(value, high), position, f" {label}", INK, bold=True)
    shares = []
    for name, key in (("MBU", "mbu"), ("MFU", "mfu")):
        if row.get(key) is not None:
            shares.append(f"{name} {cell(row, key, 'percent')}")
        if row.get(f"vendor_{key}") is not None:
            shares.append(f"{format_value(row[f'vendor_{key}'], 'percent')} of data sheet")
    if cache and row.get("cache_bytes_per_token") is not None:
        shares.append(f"cache {format_value(row['cache_bytes_per_token'], 'count')} bytes/token")
    if shares:
        # placed by matplotlib right after the bold text, whatever its width
        axes.annotate(
            "  " + ", ".join(shares),
            xy=(1, 0.5),
            xycoords=text,
            fontsize=8.5,
            color=SOFT,
            va="center",
            annotation_clip=False,
        )


def _text(axes: Axes, x: float, y: float, text: str, color: str, *, bold: bool = False) -> Any:
    return axes.text(x, y, text, fontsize=9.5, color=color, va="center", fontweight="bold" if bold else "normal")


def _headings(figure: Figure, height: float, report: Mapping[str, Any], title: str) -> None:
    """Title and model above the bars, machine and limits below; distances in inches, so that all ladders look alike."""
    settings = report.get("settings", {})
    model = settings.get("model") or settings.get("shape") or settings.get("recipe")
    figure.text(0.02, 1 - 0.28 / height, title, fontsize=14, fontweight="bold", color=INK, va="center")
    device = str(report["limits"].get("device", "cpu"))
    threads = f", {settings['threads']} threads" if settings.get("threads") and device == "cpu" else ""
    line = machine_line(report["machine"], device) + threads
    subtitle = f"{model} on {line}" if model else line
    figure.text(0.02, 1 - 0.55 / height, subtitle, fontsize=9, color=SOFT, va="center")
    foot = f"{limits_line(report)}. Medians of {settings.get('rounds', '?')} interleaved rounds"
    figure.text(0.02, 0.16 / height, foot, fontsize=7.5, color=SOFT, va="center")


def _shorten(text: str, length: int = 95) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def save(figure: Figure, path: str | Path) -> None:
    """Write a PNG; its folder is made if need be. Raises ResourceError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            FigureCanvasAgg(figure).print_png(part)
    except OSError as error:
        raise ResourceError(f"cannot write picture {path}: {error.strerror}") from error
