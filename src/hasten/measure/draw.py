"""Pictures: a ladder as horizontal bars, and curves such as the loss of a training run.

Drawn with matplotlib's objects, never through pyplot: no window, and its settings are ours only while we draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import ResourceError
from hasten.machine.files import replacing
from hasten.measure.report import SPEED_METRICS
from hasten.measure.table import cell, format_value, limits_line, machine_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hasten.planning.memory import Memory

INK, SOFT, GRID = "#1c2733", "#66717d", "#e4e8ec"
BAR, BAR_FIRST, BAR_FURTHER, FAILED = "#2f6f9f", "#a9b8c6", "#8db4cf", "#b23a2e"
LINES = ("#2f6f9f", "#d07a2d", "#4d8f5b", "#8a5a9e", "#b23a2e", "#66717d")
STYLE = {  # what differs from matplotlib's whitegrid
    "savefig.dpi": 150,
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],  # it comes with matplotlib
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler(color={LINES})",
    "grid.color": GRID,
    "lines.markersize": 4,
}
SHARES = (  # behind a bar: in words, key, how a value is written
    ("{} predicted", "predicted_tokens_per_second", "speed"),
    ("{} accepted", "acceptance", "percent"),
    ("MBU {}", "mbu", "percent"),
    ("{} of data sheet", "vendor_mbu", "percent"),
    ("MFU {}", "mfu", "percent"),
    ("{} of data sheet", "vendor_mfu", "percent"),
    ("cache {} bytes/token", "cache_bytes_per_token", "count"),
    ("perplexity {}", "perplexity", "speed"),
    ("KL {}", "kl_mean", "fine"),
)
UNITS = {"generate": "decode, tokens/s", "train": "tokens/s"}


def draw_ladder(report: Mapping[str, Any], path: str | Path, *, title: str) -> None:
    """Draws a report as a PNG: one bar a rung with its speed, speed-up and utilisation; the machine underneath.

    The thin line over a bar goes from the slowest to the fastest round. Raises ResourceError if it cannot be written.
    """
    rows, speed = report["rows"], SPEED_METRICS[report["kind"]]
    worked = [row for row in rows if "error" not in row and row.get(speed) is not None]
    caches = len({row["cache_bytes_per_token"] for row in worked if "cache_bytes_per_token" in row}) > 1
    drafted = sum("acceptance" in row for row in worked)
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
        room=1.6 + 0.2 * (caches or any("perplexity" in row for row in worked)) + 0.75 * (drafted > 0),
    )


def _shares(row: Mapping[str, Any], *, cache: bool) -> str:
    """What was predicted, a rung's shares of the machine's limits, its drafts and cache, and how well it predicts."""
    shown = [
        share for share in SHARES if row.get(share[1]) is not None and (cache or share[1] != "cache_bytes_per_token")
    ]
    return ", ".join(text.format(cell(row, key, style)) for text, key, style in shown)


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar: its label in bold, a note, and the ends of the line over it; or an error."""

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
    with picture(path, title=title, foot=foot, size=(9.6, 1.55 + 0.52 * len(bars))) as figure:
        axes = figure.subplots()
        widest = max((max(bar.value, bar.spread[1]) for bar in bars), default=0.0) or 1.0
        axes.set(title=subtitle, xlim=(0, widest * room), ylim=(len(bars) - 0.45, -0.55))
        for position, bar in enumerate(bars):
            _draw_bar(axes, position, bar)
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=10, color=INK)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= widest * 1.05])
        axes.set_xlabel(x_label, loc="left")
        axes.grid(visible=False, axis="y")
        axes.set_frame_on(False)
        axes.axvline(0, color=SOFT, linewidth=1)


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
        place: dict[str, Any] = {"xy": (1, 0.5), "xycoords": text, "va": "center", "annotation_clip": False}
        axes.annotate(f"  {bar.note}", fontsize=8.5, color=SOFT, **place)


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
    from matplotlib import rcParams

    with curve_axes(path, title=title, subtitle=subtitle, x_label=x_label, y_label=y_label) as axes:
        colors = len(rcParams["axes.prop_cycle"])
        for number, (name, (x, y)) in enumerate(series.items()):  # where colors come again, lines differ
            style = ("-", "--", ":")[number // colors % 3]
            axes.plot(x, y, label=name, linestyle=style, marker="o" if len(x) < 12 else None)
        axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")


@contextmanager
def curve_axes(path: str | Path, *, title: str, subtitle: str, x_label: str, y_label: str) -> Iterator[Axes]:
    """The axes of a picture of curves, written as a PNG when the block ends.

    All have two thin axes, a faint grid, title and subtitle above, and the names of several curves in a legend.
    """
    with picture(path, title=title, size=(8, 4.6)) as figure:
        axes = figure.subplots()
        axes.set(title=subtitle, xlabel=x_label, ylabel=y_label)
        yield axes
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend()


def draw_memory(memory: Memory, path: str | Path, *, title: str, free: int) -> None:
    """One stacked bar of the bytes of each moment; a line where no more are free, if that is near."""
    from matplotlib import colormaps

    with picture(path, title=title, size=(9.6, 3.6)) as figure:
        axes, shown = figure.subplots(), dict[str, Any]()
        for row, parts in enumerate(memory.moments.values()):
            left = 0.0
            for part in filter(memory.parts.get, parts):
                color = colormaps["tab20"](list(memory.parts).index(part))
                shown[part] = axes.barh(row, memory.parts[part] / 1e9, left=left, color=color, height=0.6)
                left += memory.parts[part] / 1e9
            axes.text(left, row, f" {left:,.2f} GB", va="center", fontsize=9)
        if free < 3 * memory.peak:
            axes.axvline(free / 1e9, color=BAR, linewidth=1.5)
        axes.set_yticks(range(len(memory.moments)), list(memory.moments), fontsize=9, color=INK)
        axes.margins(x=0.12)
        axes.set_frame_on(False)
        figure.legend(list(shown.values()), list(shown), loc="outside lower left", ncols=3, fontsize=7)


@contextmanager
def picture(path: str | Path, *, title: str, size: tuple[float, float], foot: str = "") -> Iterator[Figure]:
    """A figure in our style, of `size` inches, written as a PNG when the block ends.

    Its folder is made if need be. Raises ResourceError where it cannot be written.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    path = Path(path)
    with style.context(["seaborn-v0_8-whitegrid", STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.supxlabel(foot, x=0.01, ha="left", fontsize=7.5, color=SOFT)
        yield figure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                figure.savefig(part, format="png", bbox_inches="tight")  # no label is cut
        except OSError as error:
            raise ResourceError(f"cannot write picture {path}: {error.strerror}") from error
