"""`hasten train --profile`: where the time of a training step goes, and where the next gain is.

Three measurements of the same step: its parts against the machine's limits, its operators (torch.profiler, with a trace
for chrome://tracing or ui.perfetto.dev), and its FLOPs (torch's FlopCounterMode, on a step that is not compiled).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from hasten.data import Batch
from hasten.machine import measure_limits
from hasten.machine.files import save_json
from hasten.ops.attention.train import flop_formulas
from hasten.training.meter import PARTS, MeteredStep, clock
from hasten.training.recipe import Recipe
from hasten.training.setup import Setup, set_up

WARMING = 3  # steps: compile, fill caches
MEASURED = 3
OPERATORS = 14  # as many are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """One part of a step. seconds and FLOPs: forward and backward. bytes: that have to be moved at the least.

    limit: the seconds that the FLOPs take at the matrix rate or the bytes at the bandwidth, whichever is longer.
    """

    name: str
    seconds: float
    flops: float
    bytes: float
    limit: float

    @property
    def share(self) -> float:
        """limit over seconds: 1 is the machine's limit."""
        return self.limit / self.seconds if self.seconds else 0.0

    @property
    def lost(self) -> float:
        """Seconds above the limit."""
        return max(0.0, self.seconds - self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """The time inside one operator, of a step: without that of the operators it calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Of one optimizer step. rate: FLOP/s of matrix products in the recipe's precision; bandwidth: bytes/s."""

    seconds: float
    tokens: int
    rate: float
    bandwidth: float
    parts: tuple[PartTime, ...]
    operators: tuple[OperatorTime, ...]
    trace: Path

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self) | {"trace": self.trace.name, "next_gain": self.next_gain()}

    def next_gain(self) -> str:
        """The part with the most time above its limit, in words."""
        worst = max(self.parts, key=lambda part: part.lost)
        return (
            f"{worst.name}: {1000 * worst.lost:.0f} ms of a step of {1000 * self.seconds:.0f} ms are above what the "
            f"machine's limits allow ({worst.lost / self.seconds:.0%} of the step; it is at {worst.share:.0%} of its "
            "limit)"
        )


def profile(recipe: Recipe, folder: Path, *, progress: bool = True) -> StepProfile:
    """Measure some steps of a recipe and write trace.json and profile.json into a folder. Nothing of a run is touched.

    Raises what `train` raises before its first step.
    """
    from torch._inductor import config as inductor_config

    recipe.check()
    # Compiled kernels of the CPU get their own names in the trace.
    with inductor_config.patch({"cpp.enable_kernel_profile": True}):
        setup = set_up(recipe, progress=progress)
        batches = [setup.batches.batch(position) for position in range(recipe.data.accumulation)]
        for _ in range(WARMING):
            setup.step.run(batches, learning_rate=0.0)
        limits = measure_limits(setup.model.device, (setup.step.precision.dtype,))
        rate, bandwidth = limits.rates.get(setup.step.precision.name, 0.0), limits.bandwidth
        timed, seconds = _timed(setup, batches)
        flops = _counted(setup, batches)
        folder.mkdir(parents=True, exist_ok=True)
        operators = _traced(setup, batches, folder / "trace.json")
    weights = sum(p.numel() for p in setup.step.parameters)
    # Clipping reads the gradients once or twice; AdamW reads weights, gradients and two means, and writes three.
    update = 4.0 * weights * (7 + (2 if setup.step.clip else 1))
    parts = []
    for name in PARTS:
        moved = update if name == "update" else timed.moved[name] / MEASURED
        limit = max(flops[name] / rate if rate else 0.0, moved / bandwidth)
        spent = timed.spent[name] / MEASURED
        parts.append(PartTime(name=name, seconds=spent, flops=flops[name], bytes=moved, limit=limit))
    found = StepProfile(
        seconds=seconds,
        tokens=sum(batch.inputs.numel() for batch in batches),
        rate=rate,
        bandwidth=bandwidth,
        parts=tuple(parts),
        operators=operators,
        trace=folder / "trace.json",
    )
    save_json(folder / "profile.json", found.to_json())
    return found


def _timed(setup: Setup, batches: list[Batch]) -> tuple[MeteredStep, float]:
    """Some steps, metered in seconds, and the seconds of one."""
    read = clock(setup.model.device)
    with MeteredStep(setup.step, read) as step:
        before = read()
        for _ in range(MEASURED):
            step.run(batches, learning_rate=0.0)
        return step, (read() - before) / MEASURED


def _counted(setup: Setup, batches: list[Batch]) -> dict[str, float]:
    """FLOPs by part, of a step."""
    counter = FlopCounterMode(display=False, custom_mapping=_loss_flops() | flop_formulas())
    metered = MeteredStep(setup.step, lambda: float(counter.get_total_flops()))
    with torch.compiler.set_stance("force_eager"), metered as step, counter:
        step.run(batches, learning_rate=0.0)
    return step.spent


def _loss_flops() -> dict[Any, Any]:
    """PyTorch's chunked loss hides its products from the counter: logits, and where asked for both gradients."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return {}
    import_module("torch.nn.modules.linear_cross_entropy")  # it is registered there

    def count(x: Any, weight: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
        rows, hidden = x
        return 3 * 2 * rows * hidden * int(weight[0])

    return {torch.ops.torch_nn._linear_cross_entropy_batch_chunked: count}


def _traced(setup: Setup, batches: list[Batch], path: Path) -> tuple[OperatorTime, ...]:
    """Write the trace of a step and give its most expensive operators."""
    cuda = setup.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(activities=activities) as profiler:
        setup.step.run(batches, learning_rate=0.0)
        clock(setup.model.device)()
    profiler.export_chrome_trace(str(path))
    spent: Callable[[Any], float] = lambda event: event.self_device_time_total if cuda else event.self_cpu_time_total  # noqa: E731
    events = sorted(profiler.key_averages(), key=spent, reverse=True)[:OPERATORS]
    return tuple(OperatorTime(name=event.key, calls=event.count, seconds=spent(event) / 1e6) for event in events)
