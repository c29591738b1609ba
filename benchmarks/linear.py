"""How near the linear operator comes to the machine's limits: the memory's for few rows, the matrix units' for many.

    python benchmarks/linear.py --output benchmarks/results/linear.json

For each number of rows, all formats are measured in turn, with a plain read of memory and PyTorch's own products of
64 and 512 rows beside them in every round, because a shared machine changes its speed within seconds. Matrices of few
rows are far larger than the last-level cache. Fractions are of the limit measured in the same rounds; of several
rounds the fastest counts for the limits and for us alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512, 2048)
KINDS = (("bfloat16", "float"), ("int8", "int8"), ("int8", "float"), ("int4", "int8"), ("int4", "float"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpeed:
    """Measure the native linear operator against the machine's limits."""

    threads: int = 2
    """Threads of torch."""

    rounds: int = 15
    """Interleaved rounds; the fastest time of each counts."""

    rows: tuple[int, ...] = ROWS
    """Numbers of rows of x."""

    inputs: int = 2048
    """K."""

    outputs: int = 5632
    """N of products with more than 16 rows; few rows get as many outputs as make 256 MB."""

    group_size: int = 128
    """int4: values that share a scale."""

    megabytes: int = 256
    """Size of the weight for at most 16 rows, in MB (10^6 bytes)."""

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case."""

    def run(self) -> None:
        import torch

        from hasten.machine import describe
        from hasten.machine.files import write_json
        from hasten.ops.native import library

        torch.set_num_threads(self.threads)
        native = library()
        if native is None:
            raise SystemExit(1)
        result: dict[str, Any] = {
            "schema": 1,
            "machine": describe().to_json(),
            "isa": native.isa,
            "threads": self.threads,
            "inputs": self.inputs,
            "group_size": self.group_size,
            "rows": [],
        }
        with torch.no_grad():
            for few in (True, False):
                counts = [rows for rows in self.rows if (rows <= 16) == few]
                if counts:
                    result["rows"] += measure(self, counts, few=few)
        result["int4"] = int4_rates(result["rows"])
        print(table(result["rows"]))
        for rate in result["int4"]:
            print(
                f"int4 at {rate['rows']:>4} rows: {rate['of_matrix_rate']:.2f} of the int8 matrix rate, "
                f"{rate['of_int8_product']:.2f} of our int8 product's rate"
            )
        write_json(self.output, result)


def int4_rates(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """How int4 with int8 activations meets the int8 matrix rate from 8 rows on, and our int8 product of as many rows.

    The aim is 0.75 of the matrix rate.
    """
    rates = {(row["rows"], row["format"]): row for row in rows if row["activations"] == "int8"}
    return [
        {
            "rows": count,
            "of_matrix_rate": row["matrix_rate_fraction"],
            "of_int8_product": row["giga_operations_per_second"] / rates[count, "int8"]["giga_operations_per_second"],
        }
        for (count, format), row in rates.items()
        if format == "int4" and count >= 8
    ]


def measure(settings: LinearSpeed, counts: list[int], *, few: bool) -> list[dict[str, Any]]:
    """Rows of the result for the row counts; `few`: on large matrices."""
    import torch

    k = settings.inputs
    bits = {"bfloat16": 16, "int8": 8, "int4": 4}
    sizes = {f: settings.megabytes * 10**6 * 8 // (bits[f] * k) // 64 * 64 if few else settings.outputs for f in bits}
    layers = {kind: random_layer(*kind, sizes[kind[0]], k, settings.group_size) for kind in KINDS}
    inputs = {rows: torch.randn(rows, k).bfloat16() for rows in counts}
    limits = limit_calls(k, settings.outputs)
    calls: dict[Any, Callable[[], object]] = dict(limits)
    for rows in counts:
        for kind, layer in layers.items():
            calls[(rows, *kind)] = lambda layer=layer, x=inputs[rows]: layer(x)  # type: ignore[misc]
    best = fastest(calls, settings.rounds)
    bandwidth = READ_BYTES / best["read"]
    bf16, int8 = best["bfloat16"], best["int8"]
    rates = {"bfloat16": 2 * 512 * settings.outputs * k / bf16, "int8": 2 * 512 * settings.outputs * k / int8}
    found = []
    for rows in counts:
        for kind, layer in layers.items():
            seconds = best[(rows, *kind)]
            held = sum(buffer.nbytes for buffer in layer.buffers())
            rate = rates["bfloat16" if kind[0] == "bfloat16" else "int8"]
            operations = 2 * rows * layer.out_features * k
            found.append(
                {
                    "rows": rows,
                    "format": kind[0],
                    "activations": kind[1],
                    "seconds": seconds,
                    "weight_bytes": held,
                    "gb_per_second": held / seconds / 1e9,
                    "bandwidth_fraction": held / seconds / bandwidth if few else None,
                    "giga_operations_per_second": operations / seconds / 1e9,
                    "matrix_rate_fraction": operations / seconds / rate,
                    "read_gb_per_second": bandwidth / 1e9,
                    "matrix_giga_operations_per_second": rate / 1e9,
                }
            )
    return found


READ_BYTES = 512 << 20


def limit_calls(k: int, n: int) -> dict[str, Callable[[], object]]:
    """The limits, by name: a read of memory, and PyTorch's bf16 and int8 products of 512 rows."""
    import torch
    import torch.nn.functional as F

    buffer = torch.ones(READ_BYTES // 4)
    x, w = torch.randn(512, k).bfloat16(), torch.randn(n, k).bfloat16()
    xi, wi = (torch.randint(-127, 127, (size, k), dtype=torch.int8) for size in (512, n))
    return {"read": buffer.sum, "bfloat16": lambda: F.linear(x, w), "int8": lambda: torch._int_mm(xi, wi.t())}


def random_layer(format: str, activations: str, n: int, k: int, group_size: int) -> Any:
    """A native layer of random weights, made in its packed layout at once."""

    import torch

    from hasten.ops.linear import BFLOAT16, INT8, PackedLinear, int4_format

    known = {"bfloat16": BFLOAT16, "int8": INT8, "int4": int4_format(group_size, scale_dtype=torch.float16)}
    layer = PackedLinear(k, n, known[format], activations=activations, kernel="native")
    if format == "bfloat16":
        layer.data.normal_()
    else:
        layer.data.random_(0, 256)
        assert layer.scales is not None
        layer.scales.uniform_(0.01, 0.02)
    return layer


def fastest(calls: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """The fastest time of each call over rounds that visit them all in turn."""
    best: dict[Any, float] = {}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            if number:  # the first round warms up
                best[name] = min(best.get(name, seconds), seconds)
    return best


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for kind in KINDS:
        own = [row for row in rows if (row["format"], row["activations"]) == kind]
        cells = []
        for row in own:
            read = f"{row['bandwidth_fraction']:.2f}" if row["bandwidth_fraction"] else "   -"
            cells.append(f"{row['rows']:>5} rows {read} of read, {row['matrix_rate_fraction']:.2f} of matrix rate")
        lines += [f"{kind[0]}, activations {kind[1]}", *cells]
    first = rows[0]
    limits = f"read {first['read_gb_per_second']:.1f} GB/s"
    for row in rows:
        limits += f"; {row['format']} {row['matrix_giga_operations_per_second']:.0f} GOP/s" if row["rows"] == 1 else ""
    return "\n".join([limits, *lines])


if __name__ == "__main__":
    import tyro

    tyro.cli(LinearSpeed).run()
