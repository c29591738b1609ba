"""`hasten doctor`: show what the machine offers, what is missing and how to fix it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hasten.cli.options import JsonOption
from hasten.errors import ConfigError, ResourceError
from hasten.machine import MATRIX_DTYPES, cache_root, cache_sizes, configure, describe, measure_limits, vendor_limits
from hasten.machine.bandwidth import keep_bandwidth
from hasten.machine.checkup import Finding, check_machine, check_rates
from hasten.machine.progress import bars

SECONDS = 0.5  # for each measurement
MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "missing": "[red]missing[/red]"}


@dataclass(frozen=True, kw_only=True)
class Doctor(JsonOption):
    """Print what this machine offers, what is missing and how to fix it."""

    quick: bool = False
    """Leave out the measurements of memory bandwidth and matrix products (about ten seconds)."""

    def run(self) -> None:
        found = examine(quick=self.quick)
        if self.write(found):
            show(found)


def examine(*, quick: bool = False) -> dict[str, Any]:
    """Examine the machine, and measure it unless `quick`. Raises ResourceError if torch cannot be imported.

    Returns plain JSON values without folder names, fit for a bug report. "limits" by device name: bandwidth in bytes/s,
    rates in FLOP/s; empty if quick.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "pip install torch (see pytorch.org for the build that fits your GPU)"
        raise ResourceError(f"torch cannot be imported: {error}; {advice}") from error

    configure()  # the number of threads that other commands use
    machine = describe()
    kernels, ready = _kernels()
    findings = [*check_machine(machine, prebuilt=ready), kernels]
    limits: dict[str, dict[str, Any]] = {}
    if not quick:
        devices = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
        limits = {device: _measure(device) for device in devices}
        keep_bandwidth(limits["cpu"]["bandwidth"])  # the page of `hasten serve` shows speeds beside it
        findings += check_rates(limits["cpu"]["rates"])
    return {
        "schema": 1,
        "machine": machine.to_json(),
        "limits": limits,
        "caches": cache_sizes(),
        "findings": [asdict(finding) for finding in findings],
    }


def _kernels() -> tuple[Finding, bool]:
    """The finding on the native kernels, and whether they came with the wheel."""
    from hasten.ops.build import prebuilt
    from hasten.ops.native import NONE, choose_isa

    try:
        isa = choose_isa()
    except ConfigError as error:
        return Finding("native kernels", "missing", str(error), "unset HASTEN_ISA, or set one of these"), False
    if isa == NONE:
        fix = "unset HASTEN_ISA"
        return Finding("native kernels", "note", "HASTEN_ISA is none: PyTorch's slower ones", fix), False
    ready = bool(prebuilt(isa))
    origin = "prebuilt" if ready else "compiled on first use"
    return Finding("native kernels", "ok", f"for {isa}, {origin}"), ready


def _measure(device: str) -> dict[str, Any]:
    """Measure the limits of one device, with a progress bar; with those of its data sheet if it is known."""
    import torch

    with bars("count", "remaining") as progress:
        bar = progress.add_task("", total=2 + len(MATRIX_DTYPES))
        found: dict[str, Any] = asdict(
            measure_limits(
                device,
                MATRIX_DTYPES,
                seconds=SECONDS,
                tell=lambda what: progress.update(bar, advance=1, description=f"measuring {device}: {what}"),
            )
        )
    found["threads"] = torch.get_num_threads() if device == "cpu" else None
    vendor = vendor_limits(torch.cuda.get_device_name(device)) if device != "cpu" else None
    if vendor:
        found["vendor"] = {"bandwidth": vendor.bandwidth} | vendor.rates
    return found


def show(found: Mapping[str, Any]) -> None:
    """Print the findings as tables."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in found["findings"]:
        text = Text(finding["found"])
        if finding["fix"]:
            text.append(f"\n→ {finding['fix']}", style="yellow")
        table.add_row(MARKS[finding["status"]], finding["name"], text)
    console.print(table)
    for device, limits in found["limits"].items():
        threads, vendor = f" with {limits['threads']} threads" if limits["threads"] else "", limits.get("vendor", {})
        console.print(f"\nmeasured on {device}{threads}", style="bold")
        measured = {"bandwidth": limits["bandwidth"]} | limits["rates"]
        for name in ("bandwidth", *MATRIX_DTYPES):
            value, sheet = measured.get(name), vendor.get(name)
            unit = {"bandwidth": "GB/s", "int8": "GOP/s"}.get(name, "GFLOP/s")
            share = f"  ({100 * value / sheet:.0f}% of the data sheet's)" if value and sheet else ""
            speed = f"{value / 1e9:>9,.1f} {unit}{share}" if value is not None else "[dim]not with this torch[/dim]"
            console.print(f"  {name.replace('bandwidth', 'memory'):<16} {speed}")
    console.print(f"\ncaches in {cache_root()} (safe to delete)", style="bold")
    for name, size in found["caches"].items():
        console.print(f"  {name:<16} {size / 2**20:>9,.1f} MiB")
    missing = [finding["name"] for finding in found["findings"] if finding["status"] == "missing"]
    verdict = f"missing: {', '.join(missing)}" if missing else "everything needed is here"
    console.print(f"\n{verdict}", style="red" if missing else "green")
