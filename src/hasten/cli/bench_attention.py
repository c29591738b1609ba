"""`hasten bench attention`: time and memory of every attention kernel against the length."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hasten.cli.options import Threads, thread_count
from hasten.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchAttention:
    """Attention: time and peak memory of every kernel against the length, as a table, JSON and two pictures."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens (T = S)."""
    kernels: str = ""
    """Only these, separated by commas; all that serve the call by default."""
    batch: int = 1
    """Sequences."""
    heads: int = 8
    """Query heads."""
    kv_heads: int | None = None
    """Key/value heads; as many as query heads by default."""
    head_dim: int = 64
    """Head size."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of q, k and v."""
    causal: bool = True
    """A query sees the keys up to its own position."""
    backward: bool = True
    """Also the backward pass."""
    rounds: int = 3
    """Every kernel is measured once in each round; the median counts."""
    point_seconds: float = 60.0
    """A kernel is not asked for a length that will take longer than this."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    seed: int = 0
    """Decides the random inputs."""
    json: str | None = None
    """Write the report as JSON to this file; "-": to standard output, and nothing else there."""
    picture: str | None = None
    """Draw two PNGs, NAME-time.png and NAME-memory.png, for this NAME (with or without .png)."""

    def run(self) -> None:
        from hasten.bench.attention import AttentionCall, AttentionGrowth
        from hasten.bench.report import require_writable, write_json
        from hasten.machine import available_cores, resolve_device

        require_writable(self.json)
        pictures = self._pictures()
        for path in pictures:
            require_writable(path)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if min(self.batch, self.heads, kv_heads, self.head_dim) < 1 or self.heads % kv_heads:
            raise ConfigError("--batch, --heads, --kv-heads and --head-dim start at 1, and heads are shared evenly")
        threads = thread_count(self.threads) or available_cores().physical
        call = AttentionCall(
            batch=self.batch,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
            device=str(resolve_device(self.device)),
            gradient=self.backward,
        )
        report = AttentionGrowth(
            call=call,
            lengths=self.lengths,
            kernels=tuple(name.strip() for name in self.kernels.split(",") if name.strip()),
            rounds=self.rounds,
            threads=threads,
            seed=self.seed,
            point_seconds=self.point_seconds,
        ).run(progress=lambda text: print(text, file=sys.stderr))
        if self.json is not None:
            write_json(self.json, report)
        if pictures:
            from hasten.bench.attention_picture import draw_growth

            draw_growth(report, *pictures)
        print_growth(report)
        if all("rounds" not in point for point in report["points"]):
            raise SystemExit(1)

    def _pictures(self) -> tuple[str, ...]:
        if self.picture is None:
            return ()
        path = Path(self.picture)
        if path.suffix not in ("", ".png") and not path.suffix[1:].isdigit():
            raise ConfigError(
                f"--picture is {self.picture}; the pictures are PNG: give a name that ends so, or no ending"
            )
        stem = path.with_suffix("") if path.suffix == ".png" else path
        return tuple(f"{stem}-{what}.png" for what in ("time", "memory"))


def print_growth(report: dict[str, Any]) -> None:
    """The table, to standard error: one line a kernel and length, and how time and memory grow at the end."""
    from rich.console import Console
    from rich.table import Table

    from hasten.bench.table import format_value, machine_line

    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=150)
    table = Table()
    phases = ("forward", "forward_backward") if report["settings"]["gradient"] else ("forward",)
    for heading in ("kernel", "tokens"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for phase in phases:
        name = phase.replace("_", " + ")
        for heading in (f"{name}, ms", "GFLOP/s", "peak"):
            table.add_column(heading, justify="right")
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
