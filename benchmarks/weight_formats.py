"""What each format of a weight costs: decoding (1 row) as a share of the read bandwidth, a prompt (512 rows) as a rate.

    python benchmarks/weight_formats.py --output benchmarks/results/weight-formats.json
    benchmarks/as_avx2.sh python benchmarks/weight_formats.py --output benchmarks/results/weight-formats-avx2.json

Layers of 5632 × 2048 as of the 1.1 B Llama shape. Each format has as many copies as make `--megabytes`, far more than
the last-level cache; they are visited after each other for 1 row. All formats take turns, with a plain read of memory
in every round, because a shared machine changes its speed within seconds; medians over the rounds are reported, and of
the bandwidth the median of each round's share.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """Measure products with weights of every format that the native kernel takes."""

    threads: int = 2
    """Threads of torch."""

    rounds: int = 15
    """Interleaved rounds after one that warms up."""

    megabytes: int = 120
    """Size of all copies of a format's weight, in MB (10^6 bytes)."""

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
            raise SystemExit("there are no native kernels here")
        with torch.no_grad():
            rows = measure(self)
        for row in rows:
            print(
                f"{row['format']:>16} {row['activations']:>5}: {row['bits_per_weight']:.2f} bits, 1 row "
                f"{row['bandwidth_share']:.0%} of the read, {row['against_bf16']:.2f} × bf16, 512 rows "
                f"{row['prefill_giga_operations_per_second']:.0f} GOP/s"
            )
        settings = {"threads": self.threads, "rounds": self.rounds, "megabytes": self.megabytes, "size": [5632, 2048]}
        result = {"schema": 1, "machine": describe().to_json(), "isa": native.isa, "torch": torch.__version__}
        write_json(self.output, result | settings | {"rows": rows})


def formats() -> dict[str, Any]:
    """By the name of the row: the format."""
    import torch

    from hasten.ops.linear.weights import (
        BFLOAT16,
        FLOAT16,
        INT8,
        K_QUANTS,
        MXFP4,
        fp8_format,
        group_format,
        minimum_format,
    )

    def groups(element: str, size: int, *, symmetric: bool = True) -> Any:
        return group_format(element, size, symmetric=symmetric, scale_dtype=torch.float16)

    return {
        "bf16": BFLOAT16,
        "f16": FLOAT16,
        "int8 row": INT8,
        "int8 g32": groups("int8", 32),
        "int8 g128": groups("int8", 128),
        "int8 g128 zeros": groups("int8", 128, symmetric=False),
        "fp8 row": fp8_format(),
        "fp8 g128": fp8_format(128),
        "int4 g32": groups("int4", 32),
        "int4 g32 zeros": groups("int4", 32, symmetric=False),
        "int4 g128": groups("int4", 128),
        "int4 g128 zeros": groups("int4", 128, symmetric=False),
        "Q4_1": minimum_format("int4"),
        "Q5_0": groups("int5", 32),
        "Q5_1": minimum_format("int5"),
        "IQ4_NL": groups("iq4", 32),
        "MXFP4": MXFP4,
        **{one.name: one for one in K_QUANTS},
    }


def random_layer(format: Any, activations: str) -> Any:
    """A native layer of random bytes, whose sums are numbers, whatever their size; fp8 of a normal distribution that
    uses its range as weights do.
    """
    import torch

    from hasten.ops.linear import PackedLinear

    layer = PackedLinear(2048, 5632, format, activations=activations, kernel="native")
    for name, buffer in layer.named_buffers():
        if buffer.dtype in (torch.float16, torch.float32, torch.bfloat16):
            buffer.uniform_(0.01, 0.02)
        elif buffer.dtype == torch.float8_e4m3fn:
            buffer.copy_((torch.randn(buffer.shape) * 110).clamp(-448, 448))
        else:
            buffer.view(torch.uint8).random_(0, 16 if name == "zeros" else 256)
    return layer


def measure(settings: WeightFormats) -> list[dict[str, Any]]:
    """A row for each format, and for int8 activations where it has them."""
    import torch

    kinds = [
        (name, format, activations)
        for name, format in formats().items()
        for activations in (("float",) if "float" in format.element else ("int8", "float"))
    ]
    x, prompt = torch.randn(1, 2048).bfloat16(), torch.randn(512, 2048).bfloat16()
    buffer = torch.ones(READ_BYTES // 4)
    calls: dict[Any, Callable[[], object]] = {"read": buffer.sum}
    held: dict[Any, int] = {}
    copies: dict[Any, int] = {}
    for name, format, activations in kinds:
        first = random_layer(format, activations)
        size = sum(part.nbytes for part in first.buffers())
        layers = [first, *(random_layer(format, activations) for _ in range(settings.megabytes * 10**6 // size))]
        held[name, activations], copies[name, activations] = size, len(layers)
        calls["one", name, activations] = lambda layers=layers: [layer(x) for layer in layers]  # type: ignore[misc]
        calls["many", name, activations] = lambda layer=first: layer(prompt)  # type: ignore[misc]
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for number in range(settings.rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - start)
    found = []
    reads = [READ_BYTES / seconds for seconds in times["read"]]
    plain = [seconds / copies["bf16", "float"] for seconds in times["one", "bf16", "float"]]
    for name, _, activations in kinds:
        kind = name, activations
        one = [seconds / copies[kind] for seconds in times["one", *kind]]
        many = statistics.median(times["many", *kind])
        found.append(
            {
                "format": name,
                "activations": activations,
                "bits_per_weight": held[kind] * 8 / (5632 * 2048),
                "decode_seconds": statistics.median(one),
                "gb_per_second": held[kind] / statistics.median(one) / 1e9,
                "bandwidth_share": statistics.median(
                    held[kind] / seconds / read for seconds, read in zip(one, reads, strict=True)
                ),
                "against_bf16": statistics.median(a / b for a, b in zip(plain, one, strict=True)),
                "prefill_seconds": many,
                "prefill_giga_operations_per_second": 2 * 512 * 5632 * 2048 / many / 1e9,
                "read_gb_per_second": statistics.median(reads) / 1e9,
            }
        )
    return found


if __name__ == "__main__":
    import tyro

    tyro.cli(WeightFormats).run()
