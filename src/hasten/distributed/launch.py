"""Starts the processes of a run, joins each to the process group, and reports one error for all of them.

Rank 0 reports errors. A rank that fails writes the reason into the store of the rendezvous, aborts its connections, so
that nobody waits for it, and stays until rank 0 has reported that reason. A killed rank writes none; then the others
report that they are alive, and rank 0 names the missing one.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hasten.distributed import launched
from hasten.distributed.ranks import ALONE, Ranks
from hasten.errors import ConfigError, HastenError, TrainingError
from hasten.machine.signals import end_with_parent

TOGETHER = timedelta(minutes=5)  # in which all processes must join; torchrun starts them at once
PATIENCE = 20.0  # seconds that a failed rank waits for its reason to be reported
ROLL_CALL = 2.0  # seconds in which every rank that is alive says so
BY_US = "HASTEN_PROCESSES"  # set in processes that `start` has started, which itself reports a killed process


def remember(fact: str) -> None:
    """Record `fact` for the processes that torchrun starts instead of these if one dies."""
    if dist.is_initialized():
        _of_launch().set(fact, "")


def remembered(fact: str) -> bool:
    """True if a previous attempt of this launch recorded `fact`."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return again and dist.is_initialized() and bool(_of_launch().check([fact]))


def _of_launch() -> Any:
    """The store that outlives an attempt: torchrun's own, without the prefix of each attempt."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore("launch", store)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the process group of torchrun (or whatever set its variables), inside the context; `ALONE` without one.

    With GPUs, each process of a machine uses the one with its local rank. An error of any rank is raised on rank 0 and
    names the rank; the others exit silently with status 2. Raises ConfigError if the processes cannot connect.
    """
    if not launched():
        yield ALONE
        return
    names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
    try:
        given = {name: _number(variable, name == "local_size") for name, variable in names.items()}
        if not 0 <= given["rank"] < given["size"]:
            raise ConfigError(f"RANK is {given['rank']} and WORLD_SIZE {given['size']}; ranks count from 0")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        ranks = Ranks(**given, joined=True)
        if torch.cuda.is_available():
            gpus = torch.cuda.device_count()
            if ranks.local_size > gpus:
                raise ConfigError(f"{ranks.local_size} processes, but GPUs: {gpus}; start at most one process a GPU")
            torch.cuda.set_device(ranks.local_rank)
        if not dist.is_initialized():  # once a process: a second group would read the first one's entries in the store
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            # torchrun may keep its store when it restarts the processes: entries of the previous attempt, such as
            # addresses, must not be mistaken for this one's.
            shared, rank, size = next(iter(rendezvous("env://", timeout=TOGETHER)))
            shared.set_timeout(default_pg_timeout)
            store = PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            atexit.register(_leave)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(_unmet(error)) from None
    watch = _Watch(ranks)
    try:
        yield ranks
        if ranks.size > 1:
            dist.barrier()  # the first may still be writing
    except Exception as error:
        failure = watch.failed(error)
        if failure is error:
            raise
        raise failure from None
    finally:
        watch.over.set()


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(int(default)))
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {variable} is {text!r:.40}; it must be a whole number")
    return int(text)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _unmet(error: Exception) -> str:
    place = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
    text = str(error).split("\n")[0]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"port {place} is taken, perhaps by another run; choose another one (torchrun --master-port, MASTER_PORT)"
        )
    return f"the processes cannot connect at {place}: {text:.200}"


class _Watch:
    """Error reporting between ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.over = threading.Event()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store: Any = dist.distributed_c10d._get_default_store()
        own, other = (PrefixStore(f"hasten/{attempt}", store.clone()) for _ in range(2))  # one a thread
        self.store = own
        if ranks.first and ranks.size > 1:
            own.set("first", str(os.getpid()))
            threading.Thread(target=self._listen, args=(other,), daemon=True).start()

    def _listen(self, store: Any) -> None:
        """Report another rank's error even if this rank is computing, or waits for a rank that failed."""
        while not self.over.wait(0.5):
            with suppress(RuntimeError):
                if not store.check(["error"]):
                    continue
                if not self.over.wait(5):
                    print(f"error: {store.get('error').decode()}", file=sys.stderr, flush=True)
                    store.set("reported", "")
                    os._exit(2)
            return

    def failed(self, error: Exception) -> BaseException:
        """The exception for this rank to raise: its own, another rank's, or SystemExit where rank 0 reports it."""
        if self.ranks.size == 1:
            return error
        broken = _is_broken(error)
        known = broken or isinstance(error, HastenError | MemoryError) or "out of memory" in str(error)
        with suppress(RuntimeError):  # the store may be gone as well
            if self.ranks.first:
                self.over.set()
                try:
                    return self._named(error) if broken else error
                finally:
                    self.store.set("reported", "")
            if broken:
                self.store.set(f"here/{self.ranks.rank}", "")
            else:
                reason = str(error).split("\n")[0] or "memory ran out"
                self.store.set("error", f"rank {self.ranks.rank}: {reason}")
                dist.distributed_c10d._abort_process_group()
            self._wait("reported", PATIENCE, by=self._first())  # the launcher ends all ranks as soon as one has ended
            return SystemExit(2) if known else error
        return SystemExit(2) if broken else error

    def _named(self, error: Exception) -> HastenError | SystemExit:
        """The error that names the rank that ended, and why."""
        if self._wait("error", ROLL_CALL):
            return TrainingError(self.store.get("error").decode())
        missing = [rank for rank in range(1, self.ranks.size) if not self.store.check([f"here/{rank}"])]
        if not missing:
            reason = str(error).split("\n")[0]
            return TrainingError(f"all ranks are alive, but a connection between them broke: {reason:.200}")
        if BY_US in os.environ:
            return SystemExit(2)
        names = ", ".join(map(str, missing))
        return TrainingError(f"rank {names} ended without an error: it was killed, or the machine's memory ran out")

    def _first(self) -> int | None:
        """The process id of rank 0, if it is on this machine and has recorded it."""
        here = self.ranks.local_size == self.ranks.size and self.store.check(["first"])
        return int(self.store.get("first")) if here else None

    def _wait(self, key: str, seconds: float, by: int | None = None) -> bool:
        """Wait for a key of the store, but no longer than the process `by`, which would set it, exists."""
        end = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > end or (by is not None and not psutil.pid_exists(by)):
                return False
            time.sleep(0.05)
        return True


def _is_broken(error: Exception) -> bool:
    """Whether an error means that another rank is gone, or has not joined."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("gloo", "nccl", "peer"))
    )


def meeting(size: int) -> tuple[Any, list[dict[str, str]]]:
    """The rendezvous of `size` processes that the caller starts on this machine: a store, and each one's environment.

    Keep the store as long as they run.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return store, [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def start(arguments: Sequence[str], *, processes: int, max_restarts: int = 0, resumes: bool = True) -> None:
    """Run `python -m hasten ARGUMENTS` in `processes` processes on this machine, by torchrun's agent.

    max_restarts: how often all are started again after one has died. resumes: the command continues where it stopped.
    Raises TrainingError that names a killed rank, and SystemExit with the status of a rank that failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 1 or max_restarts < 0:
        raise ConfigError(f"--processes is {processes} and --max-restarts {max_restarts}; at least 1, and at least 0")
    os.environ[BY_US] = "1"
    # After a signal a server drains and a run saves; torch's agent would kill them after 30 seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="hasten",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(),
    )
    for part in ("", ".agent.server.api", ".multiprocessing.api"):  # errors are reported below, or by the rank
        logging.getLogger(f"torch.distributed.elastic{part}").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-m", "hasten", *arguments)
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            raise SystemExit(failure.exitcode) from None
        name = signal.Signals(-failure.exitcode).name
        advice = "; the same command continues from the last checkpoint" if resumes else ""
        if resumes and not max_restarts:
            advice += " (--max-restarts 3 does so by itself)"
        raise TrainingError(f"rank {rank} was ended by {name}{advice}") from None
