"""Pieces of a step as CUDA graphs: captured when they are wanted, in one pool of memory, as long as there is room."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.machine.cuda_graphs import capture_graph

_log = logging.getLogger("hasten.engine")
_FREE = 1 << 29  # bytes of the device that a capture leaves free
_MOST = 96  # pieces of a kind: draws, of which there are many, must not keep a forward pass out
_WARM_UP_STEPS = 1  # compiles what is compiled on first use, and lets libraries allocate their workspaces


def cuda_graph(step: Callable[[], None], reset: Callable[[], None], *, pool: Any = None) -> Callable[[], None]:
    """Warm `step` up on a stream of its own, as capturing wants it, then capture it; returns what runs it again.

    A graph replays the same kernels on the same addresses with a single launch. So everything a step reads or changes
    is in tensors that never move, and nothing that Python computes may differ from one step to the next. The device has
    to be the current one. reset: called before each step that warms up. pool: of the memory of graphs of which one runs
    at a time.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP_STEPS):
            reset()
            step()
    torch.cuda.current_stream().wait_stream(aside)
    replay, _ = capture_graph(step, pool)
    return replay


@dataclass(frozen=True, slots=True)
class Piece:
    """A captured piece: `run` repeats it, `result` is what it computed, overwritten by the next run."""

    run: Callable[[], None]
    result: Any


class LogitsBuffer:
    """The logits of captured steps of every size. One step runs at a time: all write to the memory of the largest."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._held = torch.empty(0, vocab_size, device=device)

    def rows(self, *shape: int) -> Tensor:
        """Logits (*shape, V) float32."""
        count = math.prod(shape)
        if len(self._held) < count:  # pieces that write to the smaller one keep it
            self._held = self._held.new_empty(count, self._held.shape[1])
        return self._held[:count].view(*shape, -1)


class Captures:
    """The captured pieces by their keys, and why others cannot be."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: dict[Hashable, Piece] = {}
        self.refused: dict[Hashable, str] = {}
        self.wanted: Counter[Hashable] = Counter()
        self.seconds = 0.0
        # The memory that all pieces share: one runs at a time, and what it computed is read before the next.
        self._pool: Any = None
        self.full: str | None = None  # why nothing more is captured
        self._crowded: set[type] = set()  # kinds of keys of which there are enough

    def due(self, key: Hashable, *, after: int = 2) -> bool:
        """Count a miss; True when the piece should be captured now."""
        if key in self.pieces or key in self.refused:
            return False
        self.wanted[key] += 1
        return self.wanted[key] >= after and self._room(type(key))

    def _room(self, kind: type) -> bool:
        if sum(type(one) is kind for one in self.pieces) >= _MOST:
            if kind not in self._crowded:
                self._crowded.add(kind)
                _log.warning("%d pieces are captured by a %s; further ones are not", _MOST, kind.__name__)
            return False
        if self.full is None and self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if free + cached < _FREE:
                self._stop(f"{(free + cached) >> 20} MiB of the device's memory are free")
        return self.full is None

    def _stop(self, why: str) -> None:
        self.full = why
        _log.warning("no further steps are captured: %s", why)

    def capture(
        self, key: Hashable, compute: Callable[[], Any], *, reset: Callable[[], None] = lambda: None
    ) -> Piece | None:
        """Capture what `compute` does. None, and logged, where that fails: it is not tried again.

        reset: called before each of the runs that warm up.
        """
        results: list[Any] = []

        def step() -> None:
            results[:] = [compute()]

        started = time.perf_counter()
        try:
            if self._pool is None and self.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
                run = cuda_graph(step, reset, pool=self._pool)
            piece = Piece(run, results[0])
        except Exception as error:
            lines = traceback.format_exc().splitlines()[-12:]
            self.refused[key] = f"{type(error).__name__}: {error}"
            _log.warning("%s runs uncaptured:\n%s", key, "\n".join(lines))
            return None
        took = time.perf_counter() - started
        self.seconds += took
        self.pieces[key] = piece
        _log.info("captured %s in %.2f s", key, took)
        return piece
