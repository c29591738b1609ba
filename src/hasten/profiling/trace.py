"""One step under torch's profiler: its operators, the time in none, the memory over time, a trace for Perfetto."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hasten.machine.files import write_atomically
from hasten.profiling.meter import FORWARD, Meter

OPERATORS = 14  # as many are listed
POINTS = 400  # of the memory's curve, at most
STEP = "hasten: the step"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """What torch's profiler saw of one step; tracing makes the step slower.

    outside: seconds outside all operators (on a GPU, kernels): Python, and PyTorch between them. operators: the most
    expensive ones: name, calls, seconds without the operators they call. memory: (seconds since the step began, bytes
    more than then) of torch's tensors.
    """

    seconds: float
    outside: float
    operators: tuple[tuple[str, int, float], ...]
    memory: tuple[tuple[float, int], ...]


def traced(meter: Meter, step: Callable[[], object], path: Path) -> TracedStep:
    """Trace a step under a meter and write the trace, with our parts as a track of their own."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its own start and stop to stderr
    cuda = meter.cuda
    if cuda:
        torch.cuda.memory._record_memory_history()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with meter, profile(activities=activities, profile_memory=True) as profiler, record_function(STEP):
        meter.restart()
        step()
        meter.enter("", FORWARD)
    if cuda:  # for pytorch.org/memory_viz
        torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        torch.cuda.memory._record_memory_history(enabled=None)
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    events = sorted(trace["traceEvents"], key=lambda event: float(event.get("ts", 0)))
    start, length = next((float(e["ts"]), float(e["dur"])) for e in events if e.get("name") == STEP)  # microseconds
    held, memory = 0, [(0.0, 0)]
    for event in events:
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == int(cuda):
            held += int(event["args"]["Bytes"])
            memory.append(((float(event["ts"]) - start) / 1e6, held))
    ours = {"ph": "X", "pid": "hasten", "tid": "parts"}
    origin = round(1000 * start) - meter.marks[0][2]  # in whole nanoseconds, so that no part reaches into the next
    for (part, phase, at), (_, _, end) in zip(meter.marks, meter.marks[1:], strict=False):
        ts, dur = (origin + at) / 1000, (end - at) / 1000
        trace["traceEvents"].append(ours | {"name": f"{phase} {part}", "ts": ts, "dur": dur})
    write_atomically(path, json.dumps(trace))
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
    spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") in kinds]
    spent = lambda event: event.self_device_time_total if cuda else event.self_cpu_time_total  # noqa: E731
    averages = sorted((e for e in profiler.key_averages() if e.key != STEP), key=spent, reverse=True)
    size = -(-len(memory) // POINTS)  # of each stretch only the highest point is stored, and the end
    stretches = [memory[at : at + size] for at in range(0, len(memory), size)]
    return TracedStep(
        seconds=length / 1e6,
        outside=(length - covered(spans, start, start + length)) / 1e6,
        operators=tuple((e.key, e.count, spent(e) / 1e6) for e in averages[:OPERATORS]),
        memory=(*(max(points, key=lambda point: point[1]) for points in stretches), memory[-1]),
    )


def covered(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Length of the part of start … end that is covered by at least one span; spans are sorted by start."""
    total, reached = 0.0, start
    for begin, finish in spans:
        total += max(0.0, min(finish, end) - max(begin, reached))
        reached = max(reached, finish)
    return total
