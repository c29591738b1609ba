"""Pictures: a ladder as horizontal bars, and curves such as the loss of a training run.

Drawn with matplotlib's objects and its Agg canvas, never through pyplot: no global state, no window, any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.bench.report import SPEED_METRICS
from hasten.bench.table import cell, format_value, limits_line, machine_line
from hasten.errors import ResourceError
from hasten.machine.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hasten.planning.memory import Memory

INK, SOFT, GRID = "#1c2733", "#66717d", "#e4e8ec"
BAR, BAR_FIRST, BAR_FURTHER, FAILED = "#2f6f9f", "#a9b8c6", "#8db4cf", "#b23a2e"
LINES = ("#2f6f9f", "#d07a2d", "#4d8f5b", "#8a5a9e", "#b23a2e", "#66717d")
UNITS = {"generate": "decode, tokens/s", "train": "tokens/s"}


def draw_ladder(report: Mapping[str, Any], path: str | Path, *, title: str) -> None:
    """Draws a report as a PNG: one bar a rung with its speed, speed-up and utilisation; the machine underneath.

    The thin line over a bar goes from the slowest to the fastest round. Raises ResourceError if it cannot be written.
    """
    rows, speed = report["rows"], SPEED_METRICS[report["kind"]]
    worked = [row for row in rows if "error" not in row and row.get(speed) is not None]
    caches = len({row["cache_bytes_per_token"] for row in worked if "cache_bytes_per_token" in row}) > 1
    bars = []
    for row in rows:
        if row not in worked:
            bars.append(Bar(row["name"], error=str(row.get("error", "no speed measured"))))
            continue
        value, label = row[speed], format_value(row[speed], "speed")
        for key in ("speedup", "ratio"):
            if row.get(key) is not None:
                label += f"  ({cell(row, key, 'times')})"
        low, high = (row.get(end, {}).get(speed, value) for end in ("min", "max"))
        color = BAR_FIRST if row is worked[0] else BAR_FURTHER if "ratio_to" in row else BAR
        bars.append(Bar(row["name"], value, label, _shares(row, cache=caches), color, (low, high)))
    settings, device = report["settings"], report["limits"]["device"]
    threads = f", {settings['threads']} threads" if settings.get("threads") and device == "cpu" else ""
    machine = machine_line(report["machine"], device) + threads
    draw_bars(
        bars,
        path,
        title=title,
        subtitle=f"{settings['model']} on {machine}",
        x_label=UNITS[report["kind"]],
        foot=f"{limits_line(report)}. Medians of {settings.get('rounds', '?')} interleaved rounds",
        room=1.75 if caches or any("perplexity" in row for row in worked) else 1.5,
    )


def _shares(row: Mapping[str, Any], *, cache: bool) -> str:
    """What of the machine's limits a rung has, what a token of its cache takes, and how well it predicts."""
    shares = []
    for name, key in (("MBU", "mbu"), ("MFU", "mfu")):
        if row.get(key) is not None:
            shares.append(f"{name} {cell(row, key, 'percent')}")
        if row.get(f"vendor_{key}") is not None:
            shares.append(f"{format_value(row[f'vendor_{key}'], 'percent')} of data sheet")
    if cache and row.get("cache_bytes_per_token") is not None:
        shares.append(f"cache {format_value(row['cache_bytes_per_token'], 'count')} bytes/token")
    for name, key, style in (("perplexity", "perplexity", "speed"), ("KL", "kl_mean", "fine")):
        if row.get(key) is not None:
            shares.append(f"{name} {format_value(row[key], style)}")
    return ", ".join(shares)


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar: what stands behind it in bold and after that, and the ends of a line over it; or an error."""

    name: str
    value: float = 0.0
    label: str = ""
    note: str = ""
    color: str = BAR
    spread: tuple[float, float] = (0.0, 0.0)
    error: str = ""


def draw_bars(
    bars: Sequence[Bar],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    x_label: str,
    foot: str = "",
    room: float = 1.25,
) -> None:
    """Draws bars into one PNG, the first one on top. room: width of the picture over that of the widest bar.

    Raises ResourceError if it cannot be written.
    """
    from matplotlib.figure import Figure

    # Distances in inches, so that all pictures look alike, but for the names, which are as wide as they are.
    height = 1.55 + 0.52 * len(bars)
    figure = Figure(figsize=(9.6, height), dpi=150, facecolor="white")
    left = 0.05 + 0.0088 * max(len(bar.name) for bar in bars)
    axes = figure.add_axes((left, 0.72 / height, 0.97 - left, 1 - 1.5 / height))
    widest = max((max(bar.value, bar.spread[1]) for bar in bars), default=0.0) or 1.0
    axes.set_xlim(0, widest * room)
    for position, bar in enumerate(bars):
        _draw_bar(axes, position, bar)
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=10, color=INK)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= widest * 1.05])
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor=SOFT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, fontsize=9, color=SOFT, loc="left")
    axes.set_frame_on(False)
    axes.axvline(0, color=SOFT, linewidth=1)
    figure.text(0.02, 1 - 0.28 / height, title, fontsize=14, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 1 - 0.55 / height, subtitle, fontsize=9, color=SOFT, va="center")
    figure.text(0.02, 0.16 / height, foot, fontsize=7.5, color=SOFT, va="center")
    save(figure, path)


def _draw_bar(axes: Axes, position: int, bar: Bar) -> None:
    if bar.error:
        error = bar.error if len(bar.error) <= 95 else f"{bar.error[:94]}…"
        axes.text(0, position, f" {error}", fontsize=9.5, color=FAILED, va="center")
        return
    axes.barh(position, bar.value, height=0.62, color=bar.color)
    low, high = bar.spread
    if high > low:
        middle, half = (low + high) / 2, (high - low) / 2
        axes.errorbar(middle, position, xerr=half, color=INK, linewidth=1.1, capsize=4, capthick=1.1, alpha=0.75)
    x = max(bar.value, high)
    text = axes.text(x, position, f" {bar.label}", fontsize=9.5, color=INK, va="center", fontweight="bold")
    if bar.note:
        # placed by matplotlib right after the bold text, whatever its width
        axes.annotate(
            f"  {bar.note}",
            xy=(1, 0.5),
            xycoords=text,
            fontsize=8.5,
            color=SOFT,
            va="center",
            annotation_clip=False,
        )


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
    with curve_axes(path, title=title, subtitle=subtitle, x_label=x_label, y_label=y_label) as axes:
        for index, (name, (x, y)) in enumerate(series.items()):
            assert len(x) == len(y), f"{name}: {len(x)} x values and {len(y)} y values"
            marker = "o" if len(x) < 12 else None
            axes.plot(x, y, label=name, color=LINES[index % len(LINES)], linewidth=1.6, marker=marker, markersize=4)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")


@contextmanager
def curve_axes(path: str | Path, *, title: str, subtitle: str, x_label: str, y_label: str) -> Iterator[Axes]:
    """The axes of a picture of curves, written as a PNG when the block ends.

    All have two thin axes, a faint grid, title and subtitle above, and the names of several curves in a legend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, facecolor="white")
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.71))
    yield axes
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, labelcolor=SOFT, length=0)
    axes.set_xlabel(x_label, fontsize=9.5, color=SOFT)
    axes.set_ylabel(y_label, fontsize=9.5, color=SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GRID)
    figure.text(0.03, 0.94, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.03, 0.885, subtitle, fontsize=9, color=SOFT, va="center")
    save(figure, path)


def draw_memory(memory: Memory, path: str | Path, *, title: str, free: int) -> None:
    """One stacked bar of the bytes of each moment; a line where no more are free, if that is near."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), dpi=150, facecolor="white", layout="constrained")
    axes, shown = figure.subplots(), dict[str, Any]()
    for row, parts in enumerate(memory.moments.values()):
        left = 0.0
        for part in filter(memory.parts.get, parts):
            color = colormaps["tab20"](list(memory.parts).index(part))
            shown[part] = axes.barh(row, memory.parts[part] / 1e9, left=left, color=color, height=0.6)
            left += memory.parts[part] / 1e9
        axes.text(left, row, f" {left:,.2f} GB", va="center", fontsize=9, color=INK)
    if free < 3 * memory.peak:
        axes.axvline(free / 1e9, color=BAR, linewidth=1.5)
    axes.set_yticks(range(len(memory.moments)), list(memory.moments), fontsize=9, color=INK)
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.margins(x=0.12)
    axes.set_frame_on(False)
    figure.legend(list(shown.values()), list(shown), loc="outside lower left", ncols=3, fontsize=7, frameon=False)
    save(figure, path)


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
