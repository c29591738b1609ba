"""A rung's process, from both sides: the parent starts it, asks it and notices when it dies; the child measures.

A process of its own per rung, because memory once touched is never fully given back: only so is a peak one rung's own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from hasten.errors import HastenError
from hasten.machine.threads import Threads


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of a ladder.

    `setup` names a function as "module:function"; called with `arguments` in a fresh process it returns an object with
    `measure() -> dict[str, float]` and, if it likes, `describe() -> dict`: facts such as bytes_per_token,
    flops_per_token and matrix_dtype, from which the utilisation is formed. `techniques` are all that are switched on,
    in their order. `memory_bytes` is an estimate of what the rung keeps while it waits for its turn.

    A rung may have further rows, such as the same model with more sequences at once: "rows" in what it describes holds
    for each ending of a name the facts of that row, and metrics named "ending|metric" are that row's.

    `twice`: the set-up leaves something behind (compiled code), so it is done in two processes, one after the other;
    the report has the seconds of both, and the second is measured.

    The last four are the process's own; a ladder fills them in. `compile_cache`: torch.compile's folder, if not the
    user's.
    """

    name: str
    techniques: tuple[str, ...]
    setup: str
    arguments: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    twice: bool = False
    device: str = "cpu"
    threads: Threads | None = None
    seed: int | None = None
    compile_cache: str | None = None


class ChildError(Exception):
    """The child failed: `message` in one line, and the child's own traceback if it raised something unforeseen."""

    def __init__(self, message: str, child_traceback: str = "") -> None:
        super().__init__(message, child_traceback)
        self.message, self.child_traceback = message, child_traceback


class Child:
    """The process of one rung, until it is closed.

    Every wait raises ChildError when the child failed, was killed, or took longer than `timeout` seconds.
    """

    def __init__(self, rung: Rung, *, timeout: float) -> None:
        # spawn: a forked child would share the parent's threads, memory and CUDA state
        context = multiprocessing.get_context("spawn")
        self.timeout = timeout
        self._connection, theirs = context.Pipe()
        # Not a daemon: daemons may have no children, and rungs compile and load data in processes.
        self._process = context.Process(target=serve, args=(theirs, rung), name="hasten rung")
        self._process.start()
        theirs.close()  # else the end of the child would not be noticed

    def wait_ready(self) -> dict[str, Any]:
        """Waits until the child has set up; what the rung says of itself, and "setup_seconds"."""
        return dict(self._receive())

    def measure(self) -> tuple[dict[str, float], int]:
        """Has the child measure once: the metrics, and its peak above the baseline so far, in bytes."""
        try:
            self._connection.send("measure")
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None
        metrics, peak = self._receive()
        return metrics, peak

    def close(self, *, at_once: bool = False) -> None:
        """Ends the child: politely first, so that it can end its own helpers, then by force. Can be called twice.

        at_once: by force, in the middle of whatever it does.
        """
        if at_once:
            self._process.terminate()
        elif self._process.is_alive():
            with contextlib.suppress(OSError):
                self._connection.send("stop")
        self._connection.close()
        self._process.join(2)
        for force in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                force()
                self._process.join(5)

    def _receive(self) -> Any:
        try:
            if not self._connection.poll(self.timeout):
                raise ChildError(f"no answer within {self.timeout:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ChildError(self._last_words()) from None
        if isinstance(answer, ChildError):
            raise answer
        return answer

    def _last_words(self) -> str:
        self._process.join(10)
        status = self._process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            hint = ", most likely because the memory ran out" if name == "SIGKILL" else ""
            return f"the process was killed ({name}){hint}"
        return f"the process ended by itself with exit status {status}"


def serve(connection: Connection, rung: Rung) -> None:
    """Runs in the child until the parent says "stop" or goes away."""
    # Ctrl-C reaches the whole group; the parent then ends its children, and only it reports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output may be carrying the parent's JSON.
    os.dup2(2, 1)
    if rung.compile_cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = rung.compile_cache
    try:
        _work(connection, rung)
    except (EOFError, BrokenPipeError):  # the parent is gone: there is nobody to tell
        return
    except HastenError as error:
        connection.send(ChildError(str(error)))
    except BaseException as error:
        text = str(error).strip().splitlines()
        connection.send(ChildError(f"{type(error).__name__}: {text[0] if text else ''}", traceback.format_exc()))


def _work(connection: Connection, rung: Rung) -> None:
    import torch  # noqa: F401 - the baseline is a process that has it

    from hasten.machine import configure, peak_memory, process_memory, reset_peak_memory

    configure(threads=rung.threads, seed=rung.seed)
    reset_peak_memory()
    baseline = process_memory(rung.device)
    start = time.perf_counter()
    made = pkgutil.resolve_name(rung.setup)(**rung.arguments)
    seconds = time.perf_counter() - start
    connection.send(getattr(made, "describe", dict)() | {"setup_seconds": seconds})
    while connection.recv() == "measure":
        metrics = {name: float(value) for name, value in made.measure().items()}
        connection.send((metrics, max(0, peak_memory(rung.device) - baseline)))


class LimitsProbe:
    """Measures the machine's limits like a rung: "bandwidth" in bytes/s and "rate <dtype>" in FLOP/s."""

    def __init__(self, *, device: str, dtypes: Sequence[str], seconds: float) -> None:
        self.device, self.dtypes, self.seconds = device, dtypes, seconds

    def measure(self) -> dict[str, float]:
        from hasten.machine import measure_limits

        limits = measure_limits(self.device, self.dtypes, seconds=self.seconds)
        return {"bandwidth": limits.bandwidth} | {f"rate {dtype}": rate for dtype, rate in limits.rates.items()}
