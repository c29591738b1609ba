"""Shows a profile: tables on standard error, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from hasten.measure.draw import BAR_FIRST, FAILED, SOFT, picture
from hasten.measure.table import format_value, headed_table, standard_error
from hasten.profiling.ranks import RankPart, RankTimes, folded_parts
from hasten.profiling.tree import PartTime, folded, ordered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hasten.profiling.profile import Profile, ProfiledPhase

HEAD = ("part", "parameters", "forward, ms", "backward", "of the step", "GFLOP", "MB at least", "of its limit")
RANK_HEAD = ("part", "rank", "computing, ms", "waiting", "communicating", "MB sent", "exchanges")
BARS = 10  # of the picture


def cells(row: PartTime, step: PartTime) -> list[str]:
    """Cells of a table row after the name: the columns of HEAD, and the milliseconds above the limit."""
    return [
        format_value(row.parameters or None, "count"),
        *(f"{1e3 * seconds:.3g}" if seconds else "" for seconds in (row.forward, row.backward)),
        f"{row.seconds / step.seconds:.1%}" if row.seconds else "",
        *(f"{number:.3g}" if number else "" for number in (row.flops / 1e9, row.bytes / 1e6)),
        f"{row.share:.0%}" if row.share else "",
        f"{1e3 * row.lost:.3g}" if row.seconds else "",
    ]


def in_the_tree(row: PartTime) -> str:
    """A part's name, indented under its parent."""
    *above, name = row.name.split(".")
    if name == "*":
        name = f"all {row.count}"
    return "  " * (len(above) + bool(row.name)) + (name or "step")


def summary(phase: ProfiledPhase) -> list[str]:
    """Summarize a phase in a few lines; the last one names the largest possible gain."""
    step, traced, peak = phase.rows[0].seconds, phase.traced, max(held for _, held in phase.traced.memory)
    worst, rate = ordered(folded(phase.rows), "gain")[0], phase.limits.rates.get(phase.dtype, 0.0)
    return [
        f"{phase.name}: {phase.tokens / phase.seconds:,.0f} tokens/s; limits: {rate / 1e9:,.0f} GFLOP/s "
        f"({phase.dtype}), {phase.limits.bandwidth / 1e9:.1f} GB/s; observed, a step takes {phase.overhead:+.1%}",
        f"outside of all kernels: {traced.outside / traced.seconds:.1%} of a traced step; memory: "
        f"{format_value(phase.held, 'bytes')} held, {format_value(peak, 'bytes')} more at the peak",
        f"next gain: {worst.name}, {1e3 * worst.lost:.3g} ms of a step of {1e3 * step:.3g} ms "
        f"({worst.lost / step:.0%}) are above its limit, of which it is at {worst.share:.0%}",
    ]


def rank_rows(ranks: Sequence[RankTimes]) -> list[list[str]]:
    """Rows of the table of ranks: the step and each part in which ranks exchange something, a line a rank."""
    trees = [{row.name: row for row in folded_parts(one.parts)} for one in ranks]
    rows = []
    for name in dict.fromkeys(name for tree in trees for name, row in tree.items() if row.exchanges or not name):
        for one, tree in zip(ranks, trees, strict=True):
            row = tree.get(name) or RankPart(name=name, computing=0.0)
            times = (f"{1e3 * seconds:.3g}" for seconds in (row.computing, row.waiting, row.communicating))
            depth = "  " * (name.count(".") + bool(name))
            title = depth + (name.rpartition(".")[2].replace("*", "all") or "step") if one is ranks[0] else ""
            rows.append([title, str(one.rank), *times, f"{row.sent / 1e6:.3g}", str(row.exchanges)])
    return rows


def show(profile: Profile, *, sort: str = "tree") -> None:
    """Print the tree of each phase (or its leaves, by "gain" or "time"), its ranks, operators and checks."""
    console = standard_error(width=150)
    for phase in profile.phases:
        parts, operators = headed_table(*HEAD, "ms above it"), headed_table("operator", "calls", "ms")
        rows = ordered(folded(phase.rows), sort)
        for row in rows:
            parts.add_row(Text(in_the_tree(row) if sort == "tree" else row.name), *cells(row, phase.rows[0]))
        for name, calls, seconds in phase.traced.operators:
            operators.add_row(Text(name[:80]), str(calls), f"{1e3 * seconds:.3g}")
        console.print(parts, operators)
        if phase.ranks:
            table = headed_table(*RANK_HEAD)
            for cells_of_rank in rank_rows(phase.ranks):
                table.add_row(*map(Text, cells_of_rank))
            console.print(table)
        lines = [f"{row.name}: {row.note}" for row in rows if row.note]
        lines += [f"checked: {what}: {one:,.6g}, {other:,.6g}" for what, (one, other) in phase.checks.items()]
        console.print("\n".join([*lines, *summary(phase)]), highlight=False, markup=False)
    console.print(f"{profile.folder}: profile.json, profile.png, a trace of each kind of step (ui.perfetto.dev)")


def draw(profile: Profile, path: Path) -> None:
    """Write a picture (PNG): the parts with most time beside their limits, and the memory over time, of each phase."""
    phases = profile.phases
    with picture(path, title=f"{profile.use}: time and memory", size=(6.5 * len(phases), 6.5)) as figure:
        columns = figure.subplots(2, len(phases), squeeze=False).T
        for phase, (bars, curve) in zip(phases, columns, strict=True):
            _draw_phase(phase, bars, curve)


def _draw_phase(phase: ProfiledPhase, bars: Axes, curve: Axes) -> None:
    rows = ordered(folded(phase.rows), "time")[:BARS][::-1]
    names = [row.name.removeprefix("model.") for row in rows]
    bars.barh(names, [1e3 * row.seconds for row in rows], color=BAR_FIRST, label="measured")
    bars.barh(names, [1e3 * row.limit for row in rows], height=0.35, color=FAILED, label="the machine's limit")
    bars.set(xlabel="ms of a step", title=f"{phase.name}, {1e3 * phase.rows[0].seconds:.3g} ms")
    times = [1e3 * at for at, _ in phase.traced.memory]
    held = [(phase.held + more) / 2**20 for _, more in phase.traced.memory]
    curve.fill_between(times, held, step="post", alpha=0.5, color=BAR_FIRST, label="tensors")
    curve.axhline(phase.held / 2**20, color=SOFT, linestyle="--", label="held all the time")
    curve.set(xlabel="ms of a step while it is traced", ylabel="MiB", ylim=(0, None))
    bars.legend(loc="lower right")
    curve.legend(loc="lower right")
