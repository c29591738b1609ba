"""`hasten doctor`: what the machine offers, what is missing, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from rich.console import Console

    from hasten.machine.checkup import Finding

SECONDS = 0.5  # for each measurement
MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "missing": "[red]missing[/red]"}


@dataclass(frozen=True)
class Doctor:
    """Print what this machine offers, what is missing and how to mend it."""

    json: str | None = None
    """Also write everything as JSON to this file; "-": to standard output, and nothing else there."""
    quick: bool = False
    """Leave out the measurements of memory bandwidth and matrix products (about ten seconds)."""

    def run(self) -> None:
        from hasten.machine.files import require_writable, write_json

        require_writable(self.json)
        found = examine(quick=self.quick)
        if self.json is not None:
            write_json(self.json, found.to_json())
        if self.json != "-":
            from rich.console import Console

            found.show(Console())


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything the doctor found. `limits` by device name: bandwidth in bytes/s, rates in FLOP/s; empty if quick."""

    machine: dict[str, Any]
    findings: Sequence[Finding]
    limits: Mapping[str, dict[str, Any]]
    caches: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the name of any folder: fit to be pasted into a bug report."""
        return {
            "schema": 1,
            "machine": self.machine,
            "limits": dict(self.limits),
            "caches": dict(self.caches),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def show(self, console: Console) -> None:
        """Prints it for people."""
        _show_findings(console, self.findings)
        for device, limits in self.limits.items():
            _show_limits(console, device, limits)
        _show_caches(console, self.caches)
        missing = [finding.name for finding in self.findings if finding.status == "missing"]
        text = f"missing: {', '.join(missing)}" if missing else "everything needed is here"
        console.print(text, style="red" if missing else "green", highlight=False)


def examine(*, quick: bool = False) -> Examination:
    """Looks at the machine, and unless `quick` measures it. Raises ResourceError where torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "pip install torch (see pytorch.org for the build that fits your GPU)"
        raise ResourceError(f"torch cannot be imported: {error}; {advice}") from error
    from hasten.machine import cache_sizes, configure, describe
    from hasten.machine.checkup import check_machine, check_rates

    configure()  # as many threads as every other command would take
    machine = describe()
    findings = [*check_machine(machine), _kernels()]
    limits: dict[str, dict[str, Any]] = {}
    if not quick:
        devices = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
        limits = {device: _measure(device) for device in devices}
        findings += check_rates(limits["cpu"]["rates"])
    return Examination(machine=machine.to_json(), findings=findings, limits=limits, caches=cache_sizes())


def _kernels() -> Finding:
    from hasten.machine.checkup import Finding
    from hasten.ops.native import NONE, choose_isa

    try:
        isa = choose_isa()
    except ConfigError as error:
        return Finding("native kernels", "missing", str(error), "unset HASTEN_ISA, or set one of these")
    if isa == NONE:
        return Finding("native kernels", "note", "HASTEN_ISA is none: PyTorch's slower ones", "unset HASTEN_ISA")
    return Finding("native kernels", "ok", f"for {isa}")


def _measure(device: str) -> dict[str, Any]:
    """Limits of one device, with the data sheet's where the device is known; a bar on standard error meanwhile."""
    import torch

    from hasten.machine import MATRIX_DTYPES, matrix_rate, read_bandwidth, vendor_limits
    from hasten.machine.progress import bars

    found: dict[str, Any] = {"rates": {}, "threads": torch.get_num_threads() if device == "cpu" else None}
    with bars("count", "remaining") as progress:
        bar = progress.add_task(f"measuring {device}: memory bandwidth", total=1 + len(MATRIX_DTYPES))
        found["bandwidth"] = read_bandwidth(device=device, seconds=SECONDS)
        for dtype in MATRIX_DTYPES:
            progress.update(bar, advance=1, description=f"measuring {device}: {dtype} products")
            try:
                found["rates"][dtype] = matrix_rate(dtype, device=device, seconds=SECONDS)
            except ResourceError:
                continue
    vendor = vendor_limits(torch.cuda.get_device_name(device)) if device != "cpu" else None
    if vendor:
        found["vendor"] = {"bandwidth": vendor.bandwidth, "bfloat16": vendor.bfloat16}
    return found


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        text = Text(finding.found)
        if finding.mend:
            text.append(f"\n→ {finding.mend}", style="yellow")
        table.add_row(MARKS[finding.status], finding.name, text)
    console.print(table)


def _show_limits(console: Console, device: str, limits: Mapping[str, Any]) -> None:
    vendor = limits.get("vendor", {})

    def line(name: str, value: float | None, unit: str, sheet: float | None) -> None:
        if value is None:
            console.print(f"  {name:<16} [dim]not with this torch[/dim]", highlight=False)
            return
        share = f"  ({100 * value / sheet:.0f}% of the data sheet's)" if sheet else ""
        console.print(f"  {name:<16} {value / 1e9:>9,.1f} {unit}{share}", highlight=False)

    threads = f" with {limits['threads']} threads" if limits.get("threads") else ""
    console.print(f"\nmeasured on {device}{threads}", style="bold", highlight=False)
    line("memory", limits["bandwidth"], "GB/s", vendor.get("bandwidth"))
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        unit = "GOP/s" if dtype == "int8" else "GFLOP/s"
        line(dtype, limits["rates"].get(dtype), unit, vendor.get(dtype))


def _show_caches(console: Console, caches: Mapping[str, int]) -> None:
    from hasten.machine import cache_root

    console.print(f"\ncaches in {cache_root()} (safe to delete)", style="bold", highlight=False)
    for name, size in caches.items():
        console.print(f"  {name:<16} {size / 2**20:>9,.1f} MiB", highlight=False)
    console.print()
