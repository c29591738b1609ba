"""Captures CUDA graphs: kernels are recorded once, and launched together from then on."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def capture_graph(run: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
    """Capture `run`, which has run before on the current device; returns what replays it, and its memory pool.

    pool: of the memory of graphs of which one runs at a time. Other threads may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _stream(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph.replay, graph.pool()


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The one on which a device's graphs are captured: those of a pool share memory by it. PyTorch's own is on the
    device of the first capture, whatever the later ones are of."""
    return torch.cuda.Stream(device)
