"""The child's side of a ladder: one process sets up one rung and measures it whenever it is told to.

A process of its own per rung, because memory once touched is never fully given back: only so is a peak one rung's own.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from hasten.errors import HastenError
from hasten.machine.threads import Threads


class Measurable(Protocol):
    """What a rung's set-up function returns. It may also have `describe() -> dict` with facts that never change."""

    def measure(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What a child is to do: call `setup` ("module:function") with `arguments` and measure what it returns."""

    setup: str
    arguments: dict[str, Any]
    device: str = "cpu"
    threads: Threads | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent once after setting up."""

    seconds: float
    description: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """Sent after each measure(): its metrics and the process's peak above the baseline so far, in bytes."""

    metrics: dict[str, float]
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Sent once when something raised; the child ends after it. `traceback` is empty for a user's error."""

    message: str
    traceback: str = ""


def serve(connection: Connection, task: Task) -> None:
    """Runs in the child until the parent says "stop" or goes away."""
    # Ctrl-C reaches the whole group; the parent then ends its children, and only it reports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output may be carrying the parent's JSON.
    os.dup2(2, 1)
    try:
        _work(connection, task)
    except (EOFError, BrokenPipeError):  # the parent is gone: there is nobody to tell
        return
    except HastenError as error:
        connection.send(Failed(str(error)))
    except BaseException as error:
        text = str(error).strip().splitlines()
        connection.send(Failed(f"{type(error).__name__}: {text[0] if text else ''}", traceback.format_exc()))


def _work(connection: Connection, task: Task) -> None:
    import torch  # noqa: F401 - the baseline is a process that has it

    from hasten.machine import configure, peak_memory, process_memory, reset_peak_memory

    configure(threads=task.threads, seed=task.seed)
    reset_peak_memory()
    baseline = process_memory() if task.device == "cpu" else 0  # CUDA: torch's allocator starts at nothing
    start = time.perf_counter()
    rung = resolve(task.setup)(**task.arguments)
    seconds = time.perf_counter() - start
    describe = getattr(rung, "describe", dict)
    connection.send(Ready(seconds=seconds, description=describe()))
    while connection.recv() == "measure":
        metrics = {name: float(value) for name, value in rung.measure().items()}
        connection.send(Measured(metrics, max(0, peak_memory(task.device) - baseline)))


def resolve(setup: str) -> Any:
    """The function that "module:function" names."""
    module, _, name = setup.partition(":")
    assert module and name, f"a set-up is written module:function, not {setup!r}"  # noqa: PT018
    return getattr(importlib.import_module(module), name)


class LimitsProbe:
    """Measures the machine's limits like a rung: "bandwidth" in bytes/s and "rate <dtype>" in FLOP/s."""

    def __init__(self, *, device: str, dtypes: Sequence[str], seconds: float) -> None:
        self.device = device
        self.dtypes = dtypes
        self.seconds = seconds

    def measure(self) -> dict[str, float]:
        from hasten.machine import measure_limits

        limits = measure_limits(self.device, self.dtypes, seconds=self.seconds)
        rates = {f"rate {dtype}": rate for dtype, rate in limits.rates.items()}
        return {"bandwidth": limits.bandwidth, **rates}
