"""Where a step of two ranks spends its time at each stage of ZeRO, by torch's profiler on rank 0.

    torchrun --nproc-per-node 2 benchmarks/zero_profile.py --output benchmarks/results/zero-profile.json

The demo's step as `scaling.py` measures it: 4 rows of 256 tokens a rank, one thread each, blocks not compiled. Of each
operator the time that is its own (not that of what it calls) in a step; beside it the step that nobody watches.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch.profiler import ProfilerActivity, profile

# Beginnings of the profiler's names. FSDP's own time is mostly waiting for a message.
PARTS = {
    "products": ("aten::mm", "aten::addmm"),
    "gathers": ("FSDP::all_gather", "c10d::_allgather", "gloo:all_gather"),
    "reductions": ("FSDP::post_backward_reduce", "c10d::_reduce_scatter", "c10d::allreduce", "gloo:"),
    "copies": ("aten::copy_", "aten::cat", "aten::split", "fsdp::"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroProfile:
    """Measure, print, and write."""

    steps: int = 12
    """Without the profiler, and a third as many with it."""
    output: Path | None = None

    def run(self) -> None:
        from hasten.distributed.launch import joined
        from hasten.machine import describe
        from hasten.machine.files import write_json

        torch.set_num_threads(1)
        with joined() as ranks:
            rows = [self.stage(zero, ranks) for zero in range(4)]
            if ranks.first:
                settings = {"recipe": "demo", "rows": 4, "context": 256, "ranks": ranks.size, "steps": self.steps}
                write_json(
                    self.output, {"schema": 1, "machine": describe().to_json(), "settings": settings, "rows": rows}
                )

    def stage(self, zero: int, ranks: Any) -> dict[str, Any]:
        from hasten.bench.train import StepOptions
        from hasten.data import Batch
        from hasten.model.initialize import initialize
        from hasten.training import build
        from hasten.training.precision import choose_precision
        from hasten.training.recipe import Parallel

        recipe, config = StepOptions(recipe="demo", sequence_length=256).recipe_and_config(4)
        techniques, data = replace(recipe.techniques, compile=False), replace(recipe.data, batch_size=4 * ranks.size)
        recipe, _ = choose_precision(replace(recipe, techniques=techniques, data=data, parallel=Parallel(zero=zero)))
        step = build.training_step(initialize(build.training_config(recipe, config), seed=0), recipe, ranks=ranks)
        tokens = torch.randint(config.vocab_size, (4, 257), generator=torch.Generator().manual_seed(ranks.rank))
        batch = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)]
        for _ in range(3):
            step.run(batch)
        seconds = []
        for _ in range(self.steps):
            dist.barrier()
            start = perf_counter()
            step.run(batch)
            seconds.append(perf_counter() - start)
        watched = max(1, self.steps // 3)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(watched):
                step.run(batch)
        own = {one.key: one.self_cpu_time_total / watched / 1e6 for one in seen.key_averages()}
        found: dict[str, Any] = {"zero": zero, "seconds": median(seconds), "watched": sum(own.values())}
        for part, names in PARTS.items():
            found[part] = sum(time for key, time in own.items() if key.startswith(names))
        found["operators"] = dict(sorted(own.items(), key=lambda item: -item[1])[:20])
        if ranks.first:
            print({name: round(value, 4) for name, value in found.items() if name != "operators"}, flush=True)
        return found


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For docs/distributed.md."""
    names = ("seconds", "watched", *PARTS)
    rows = [[f"zero {one['zero']}", *(f"{1e3 * one[name]:.0f} ms" for name in names)] for one in report["rows"]]
    return ["", "step", "watched", *PARTS], rows


if __name__ == "__main__":
    tyro.cli(ZeroProfile).run()
