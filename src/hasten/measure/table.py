"""The report of a ladder as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from hasten.measure.process import SKIPPED
from hasten.measure.report import SPEED_METRICS, gpu_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# of the matrix rate that an MFU is over
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}
STYLES = {"exact": "{:.4f}", "fine": "{:.5f}", "seconds": "{:.1f} s", "percent": "{:.0%}", "count": "{:,.0f}"}
# (heading, key, how a value is written), left to right; a column without any value is left out
COLUMNS = (
    ("decode tokens/s", "decode_tokens_per_second", "speed"),
    ("of each", "decode_tokens_per_second_per_sequence", "speed"),
    ("tokens/s", "tokens_per_second", "speed"),
    ("predicted", "predicted_tokens_per_second", "speed"),
    ("speed-up", "speedup", "times"),
    ("ratio", "ratio", "times"),
    ("tokens a pass", "tokens_per_pass", "times"),
    ("accepted", "acceptance", "percent"),
    ("MBU", "mbu", "percent"),
    ("MBU (vendor)", "vendor_mbu", "percent"),
    ("prefill tokens/s", "prefill_tokens_per_second", "speed"),
    ("MFU", "prefill_mfu", "percent"),
    ("MFU", "mfu", "percent"),
    ("MFU (vendor)", "vendor_mfu", "percent"),
    ("ms/batch", "milliseconds_per_batch", "speed"),
    ("perplexity", "perplexity", "exact"),
    ("KL from bf16", "kl_mean", "fine"),
    ("compile cold", "compile_seconds", "seconds"),
    ("warm", "warm_compile_seconds", "seconds"),
    ("cache bytes/token", "cache_bytes_per_token", "count"),
    ("a rank sends", "sent_bytes", "bytes"),
    ("peak memory", "peak_memory_bytes", "bytes"),
)


def cell(row: Mapping[str, Any], key: str, style: str) -> str:
    """A row's figure for people, with what it is a share or a multiple of where that is not the same in all rows."""
    text = format_value(row.get(key), style)
    if text and key == "ratio":
        base = str(row["ratio_to"])  # its own rung's row, or another ending of the same name
        return text if f"{row['name']}-".startswith(f"{base}-") else f"{text} {base.rpartition('-')[2]}"
    if text and key in ("mfu", "prefill_mfu"):
        return f"{text} {SHORT_DTYPES.get(row.get('matrix_dtype', 'float32'), '')}".rstrip()
    return text


def format_value(value: float | None, style: str) -> str:
    """A figure for people: "speed" 3 digits, "times" 1.23×, "percent", "count" 12,345, "exact" and "fine" 4 and 5
    decimals, "bytes", "seconds".
    """
    if value is None:
        return ""
    if style in STYLES:
        return STYLES[style].format(value)
    if style == "times":
        return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"
    if style == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def headed_table(*headings: str) -> Table:
    """A table with its first column to the left, and figures in the others."""
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left")
    return table


def limits_line(report: Mapping[str, Any]) -> str:
    """What the utilisation is measured against, in one line."""
    limits = report["limits"]
    if "error" in limits:
        return f"limits could not be measured: {limits['error']}"
    rates = ", ".join(
        f"{name} {rate / 1e9:,.0f} {'GOP/s' if name == 'int8' else 'GFLOP/s'}"
        for name, rate in limits["matrix_rates"].items()
    )
    return f"measured limits: {limits['bandwidth_gb_s']:.1f} GB/s" + (f", {rates}" if rates else "")


def machine_line(machine: Mapping[str, Any], device: str = "cpu") -> str:
    """The machine in one line, for the foot of a picture."""
    torch = f"torch {machine.get('versions', {}).get('torch', 'unknown')}"
    gpu = gpu_of(machine, device)
    if gpu is None:
        return f"{machine['cpu']}, {machine['physical_cores']} cores, {torch}"
    watts = gpu.get("power_limit_watts")
    return ", ".join([gpu["name"], *([f"at most {watts:.0f} W"] if watts else []), torch])


def standard_error(*, width: int) -> Console:
    """A console there. width: of a file or a pipe, which has none of its own, and where rich would take 80."""
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=width)


def print_ladder(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints one line a rung, the limits and the machine; to standard error unless a console is given.

    The spread of the speed over the rounds follows it.
    """
    from rich.text import Text

    console = console or standard_error(width=170)
    rows = report["rows"]
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    speed = SPEED_METRICS[report["kind"]]
    table = headed_table("rung", *(heading for heading, _, _ in columns))
    table.columns[0].no_wrap = True
    for row in rows:
        if "error" in row:
            word = "[dim]skipped[/dim]" if row["error"].startswith(SKIPPED) else "[red]failed[/red]"
            table.add_row(Text(row["name"]), word if columns else None)
            continue
        cells = []
        for _, key, style in columns:
            text = cell(row, key, style)
            low, high = row.get("min", {}).get(key), row.get("max", {}).get(key)
            if key == speed and low is not None and high is not None and len(row.get("rounds", [])) > 1:
                text += f" [dim]({format_value(low, style)}-{format_value(high, style)})[/dim]"
            cells.append(text)
        table.add_row(Text(row["name"]), *cells)
    console.print(table)
    for row in rows:
        if "error" in row:
            what = row["error"] if row["error"].startswith(SKIPPED) else f"failed: {row['error']}"
            console.print(f"{row['name']} {what}", style="red", markup=False, highlight=False)
    console.print(limits_line(report), style="dim", highlight=False)
    console.print(machine_line(report["machine"], report["limits"]["device"]), style="dim")


def print_growth(report: Mapping[str, Any]) -> None:
    """The table, to standard error: one line a kernel and length, and how time and memory grow at the end."""
    console = standard_error(width=150)
    phases = ("forward", "forward_backward") if report["settings"]["gradient"] else ("forward",)
    headings = [(f"{phase.replace('_', ' + ')}, ms", "GFLOP/s", "peak") for phase in phases]
    table = headed_table("kernel", "tokens", *chain(*headings))
    for point in sorted(report["points"], key=lambda point: point["kernel"]):
        cells = [point["kernel"], f"{point['tokens']:,}"]
        if "rounds" not in point:
            table.add_row(*cells, f"[dim]{point.get('skipped') or point['error']}[/dim]")
            continue
        for phase in phases:
            seconds, rate = point[f"{phase}_seconds"], point[f"{phase}_gflops"]
            cells += [f"{1000 * seconds:,.1f}", f"{rate:,.0f}", format_value(point[f"{phase}_peak_bytes"], "bytes")]
        table.add_row(*cells)
    console.print(table)
    for name, found in report["growth"].items():
        console.print(
            f"{name}: time ~ T^{found['time']:.2f}, memory ~ T^{found['memory']:.2f} "
            f"from {found['from']:,} to {found['to']:,} tokens",
            highlight=False,
        )
    for name, reason in report["absent"].items():
        console.print(f"not {name}: {reason}", style="dim", highlight=False, markup=False)
    console.print(machine_line(report["machine"], report["settings"]["device"]), style="dim", highlight=False)
