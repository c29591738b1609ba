"""Captures CUDA graphs: kernels are recorded once and then launched together."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def capture_graph(run: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
    """Capture `run`, which must have run before on the current device; returns a replay function and its memory pool.

    pool: memory shared with graphs that never run at the same time. Other threads may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _stream(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph.replay, graph.pool()


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream on which a device's graphs are captured; graphs share a pool's memory only on one stream.

    PyTorch's default capture stream stays on the device of the first capture."""
    return torch.cuda.Stream(device)
