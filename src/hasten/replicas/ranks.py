"""A replica of several ranks: its process is the first of them, and starts the others beside it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from hasten.distributed.launch import joined, meeting
from hasten.distributed.tensor_parallel import tensor_parallel

Result = TypeVar("Result")

_groups: list[ExitStack] = []  # entered, for as long as this process lives
_processes: list[SpawnProcess] = []


def lead(start: Callable[[], Result], *, follow: Callable[[], object], ranks: int) -> Result:
    """What `start` returns, called as the first of `ranks` ranks of this machine. follow: called in each other one.

    The group stays when this returns. A rank that dies is noticed in the next step, and by `dead_ranks`; the others end
    when this process does. follow is pickled. Raises what `start` raises, and TrainingError where another rank failed.
    """
    with ExitStack() as stack:
        stack.enter_context(_leading(follow, ranks))
        result = start()
        _groups.append(stack.pop_all())
    return result


def dead_ranks() -> list[int]:
    """Ranks that this process has started and that have ended."""
    return [rank for rank, process in enumerate(_processes, 1) if not process.is_alive()]


@contextmanager
def _leading(follow: Callable[[], object], ranks: int) -> Iterator[None]:
    store, (own, *others) = meeting(ranks)
    context = multiprocessing.get_context("spawn")
    for environment in others:
        process = context.Process(target=_run, args=(follow, environment), daemon=True)
        process.start()
        _processes.append(process)
    os.environ.update(own)
    with _in_group():
        yield
    del store  # through which they found each other


def _run(follow: Callable[[], object], environment: Mapping[str, str]) -> None:
    threading.Thread(target=_end_with_leader, daemon=True).start()
    os.environ.update(environment)
    with _in_group():
        follow()


def _end_with_leader() -> None:
    """End this process when the one that started it has ended, also while it loads and exchanges nothing.

    The signal of `end_with_parent` would come when the thread that started it ends, which may be one of Ray's.
    """
    leader = multiprocessing.parent_process()
    assert leader is not None
    leader.join()
    os._exit(2)


@contextmanager
def _in_group() -> Iterator[None]:
    with joined() as ranks, tensor_parallel(ranks):
        yield
