"""A job's process: `python -m gpu.worker MODULE:FUNCTION '{"json": "arguments"}'`, started by harness.py.

The function prepares (imports, weights, compiling) and then calls `serve`, which says that it is ready and runs the
commands that come line by line. Lines for the parent begin with @@. Settings come from the environment: GPU_DEVICE,
GPU_TINY (everything small, to try a job on a CPU), GPU_PEERS (the folder of the peers' model files) and GPU_UNTIL (when
measuring ends, in seconds of the clock).
"""

import gc
import importlib
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("GPU_DEVICE", "cuda")
TINY = bool(os.environ.get("GPU_TINY"))
PEERS = Path(os.environ.get("GPU_PEERS", "peers"))
START = time.perf_counter()


def emit(event: str, **values: Any) -> None:
    print("@@" + json.dumps({"event": event, **values}, default=str), flush=True)


def serve(commands: dict[str, Callable[..., Any]]) -> None:
    """Say ready, then run one command a line until `quit`."""
    tidy()
    emit("ready", seconds=round(time.perf_counter() - START, 1), **memory())
    for line in sys.stdin:
        name, *arguments = line.split()
        if name == "quit":
            break
        begin = time.perf_counter()
        try:
            found = commands[name](*arguments)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-1500:]}
        emit("result", command=line.strip(), took=round(time.perf_counter() - begin, 2), found=found)


def memory() -> dict[str, float]:
    import torch

    if DEVICE == "cpu" or not torch.cuda.is_available():
        return {}
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    return {"peak_gb": round(peak / 1e9, 2), "held_gb": round(held / 1e9, 2)}


def sync() -> None:
    import torch

    if DEVICE != "cpu":
        torch.cuda.synchronize()


def tidy() -> None:
    """Give back what warming up took: other jobs need it."""
    import torch

    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def patient(call: Callable[[], Any], forget: Callable[[], Any] = lambda: None, seconds: float = 60) -> Any:
    """The call, again where memory was short: others warm up beside it, and what was compiled stays compiled."""
    limit = time.perf_counter() + seconds
    while True:
        try:
            found = call()
            tidy()
            return found
        except RuntimeError as error:
            short = any(word in str(error) for word in ("out of memory", "CUBLAS_STATUS", "ALLOC"))
            if not short or time.perf_counter() > limit:
                raise
        forget()
        tidy()
        time.sleep(0.5 + random.random())


def seconds_of(call: Callable[[], Any], rounds: int = 5, warm: int = 1) -> float:
    """Median seconds of a call that is waited for."""
    for _ in range(warm):
        call()
    found = []
    for _ in range(rounds):
        sync()
        begin = time.perf_counter()
        call()
        sync()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def graph_ms(call: Callable[[], Any], repeats: int = 1, span: float = 40) -> float:
    """Milliseconds of one call when `repeats` of them are captured and replayed: the GPU's part alone.

    Raises RuntimeError for what cannot be captured.
    """
    import torch

    if DEVICE == "cpu":
        return 1e3 * seconds_of(call, 1, 0)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return event_ms(graph.replay, span) / repeats


def event_ms(call: Callable[[], Any], span: float = 40) -> float:
    """Median milliseconds of single calls between events; `span`: about how long all of them may take."""
    import torch

    if DEVICE == "cpu":
        return 1e3 * seconds_of(call, 1, 0)

    def once() -> tuple[Any, Any]:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        call()
        pair[1].record()
        return pair[0], pair[1]

    once()
    first = once()
    sync()
    count = max(3, min(40, int(span / max(first[0].elapsed_time(first[1]), 1e-3))))
    pairs = [once() for _ in range(count)]
    sync()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def kernel_table(run: Callable[[], Any], units: float, top: int = 16) -> dict[str, Any]:
    """GPU time by kernel for one unit (a token, a step) of `run`, which does `units` of them."""
    from torch.profiler import ProfilerActivity, profile

    run()
    if DEVICE == "cpu":
        return {"note": "no GPU"}
    sync()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        begin = time.perf_counter()
        run()
        sync()
        wall = time.perf_counter() - begin
    rows = []
    for one in found.key_averages():
        us = one.self_device_time_total
        if us and not one.key.startswith(("cuda", "Activity", "Profiler")):
            rows.append([one.key[:110], round(us / units, 2), round(one.count / units, 2)])
    rows.sort(key=lambda row: -row[1])
    busy = sum(row[1] for row in rows)
    return {
        "wall_us": round(1e6 * wall / units, 1),
        "gpu_us": round(busy, 1),
        "launches": round(sum(row[2] for row in rows), 1),
        "kernels": rows[:top],
    }


def main() -> None:
    place, function = sys.argv[1].split(":")
    arguments = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    try:
        getattr(importlib.import_module(f"gpu.{place}"), function)(**arguments)
    except Exception as error:
        emit("failed", error=f"{type(error).__name__}: {error}"[:800], trace=traceback.format_exc()[-2500:])
        raise


if __name__ == "__main__":
    main()
