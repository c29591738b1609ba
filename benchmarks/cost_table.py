"""How long the table of costs takes that drafts are chosen by, on several machines, and what it says of whole steps.

    python benchmarks/cost_table.py --output benchmarks/results/cost-table.json

The 1.1 B Llama shape in each format: with this machine's kernels, with those of AVX2 (as benchmarks/as_avx2.sh runs
them), and without native kernels, on one thread and on all; each in a process of its own. The table is made of single
blocks. `whole_over_table` is the time of whole steps, of as many rows, beside what the table says for them.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

FORMATS = {"bfloat16": "bf16", "int8": "int8", "int4": "int4 g128"}  # as rows.py names them
KERNELS: dict[str, list[str]] = {
    "this machine's": [],
    "AVX2": [str(Path(__file__).parent / "as_avx2.sh")],
    "none": ["env", "HASTEN_ISA=none"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Measure the tables, print and write."""

    shape: str = "llama-1.1b"

    context: int = 544
    """Tokens of the sequence, where whole steps are timed beside the table."""

    rows: tuple[int, ...] = (1, 4, 8)
    """Of whole steps."""

    rounds: int = 5
    """Of whole steps."""

    threads: tuple[int, ...] = (1, 2)

    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""

    only: str | None = None
    """For the processes that this one starts: one format."""

    def run(self) -> None:
        if self.only is not None:
            print(json.dumps(self.one(self.only)))
            return
        from hasten.machine import describe
        from hasten.machine.files import write_json

        rows = []
        for kernels, wrapper in KERNELS.items():
            for threads in self.threads:
                for weights in FORMATS:
                    args = [sys.executable, __file__, "--only", weights, "--threads", str(threads)]
                    args += ["--shape", self.shape, "--context", str(self.context), "--rounds", str(self.rounds)]
                    args += ["--rows", *map(str, self.rows)]
                    found = subprocess.run(wrapper + args, check=True, stdout=subprocess.PIPE, text=True)
                    rows.append({"kernels": kernels, "threads": threads, "weights": weights})
                    rows[-1] |= json.loads(found.stdout.splitlines()[-1])
                    print(rows[-1], flush=True)
        if self.output is not None:
            settings = {name: getattr(self, name) for name in ("shape", "context", "rows", "rounds")}
            write_json(self.output, {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": rows})

    def one(self, weights: str) -> dict[str, Any]:
        """A table's seconds and rows, and whole steps over what it says."""
        import time

        import torch
        from rows import fused_shape, steps_of
        from timing import interleaved

        from hasten.engine.speculation.cost import MOST_SECONDS, measure_step_cost

        torch.set_num_threads(self.threads[0])
        model = fused_shape(self.shape, FORMATS[weights])
        start = time.perf_counter()
        cost = measure_step_cost(model, most_seconds=MOST_SECONDS)
        seconds = time.perf_counter() - start
        counts = [rows for rows in self.rows if rows <= cost.rows[-1]]
        with torch.inference_mode():
            times = interleaved(steps_of(model, self.context, counts), self.rounds)
        return {
            "seconds": seconds,
            "table_rows": list(cost.rows),
            "whole_over_table": {rows: median(times[rows]) / cost.seconds(rows, self.context) for rows in counts},
        }


if __name__ == "__main__":
    import tyro

    tyro.cli(CostTable).run()
