"""Captures CUDA graphs: kernels are recorded once, and launched together from then on."""

from collections.abc import Callable
from typing import Any

import torch


def capture_graph(run: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
    """Capture `run`, which has run before; returns what replays it, and its memory pool.

    pool: of the memory of graphs of which one runs at a time. Other threads may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph.replay, graph.pool()
