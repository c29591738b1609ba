"""Measures the cost of an exchange between ranks of this machine: latency and bandwidth, in a fraction of a second.

It times sums of zeros through shared memory (`ops/collective`). The other ranks are processes forked from this one that
do nothing else, so torch is not loaded again. In a model's step the ranks additionally wait for the slowest one.
"""

import mmap
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from hasten.errors import ConfigError
from hasten.machine import Link, available_cores
from hasten.machine.measured import compare, forget
from hasten.machine.threads import share_of_cores
from hasten.ops.collective import RankGroup
from hasten.ops.native import library, native_ops
from hasten.planning.devices import LINKS

COUNTS = (2048, 32_768, 131_072)  # bfloat16 values in a sum: for one token, and for prompts
PIECE = 32_768  # values summed at a time
SUMS = 40  # sums of the smallest count in a call; fewer of the others
BUSY = 100e-6  # seconds; a piece that took longer was summed by ranks without a core of their own


def link_here(ranks: int) -> Link:
    """Link between `ranks` processes of this machine, measured once and then read from the cache.

    A typical link where it cannot be measured, or where other programs occupied the cores. Raises ConfigError for more
    ranks than cores.
    """
    require_cores(ranks)
    typical = LINKS["shared-memory"]
    if ranks == 1:
        return typical
    native = library()
    if native is None or not sys.platform.startswith("linux"):
        return LINKS["gloo"]
    what, name = f"sums of {ranks} ranks", native.path.stem
    with ExitStack() as crew:  # entered only if it has to be measured
        times = compare(what, lambda: crew.enter_context(_crew(ranks)), library=name, clock=time.perf_counter)
    if not times:
        return typical
    seconds = {count: times[str(count)] / sums for count, sums in _sums().items()}
    if all(one < BUSY * -(-count // PIECE) for count, one in seconds.items()):
        return fitted({2 * count: one for count, one in seconds.items()}, ranks=ranks)
    forget(what, library=name)  # the machine was busy; measure again next time
    return replace(typical, source=f"{typical.source}: other programs had the cores while it was measured")


def fitted(seconds: Mapping[int, float], *, ranks: int, source: str = "measured on this machine") -> Link:
    """Fit a link to the seconds of sums, by their bytes: bandwidth from the largest, latency from the smallest."""
    small, large = min(seconds), max(seconds)
    per_byte = max(seconds[large] - seconds[small], 1e-3 * seconds[large]) / (large - small)
    latency = max(0.0, seconds[small] - per_byte * small)
    return Link(latency, 0.0, (ranks - 1) / per_byte, source)


def require_cores(ranks: int) -> None:
    """Raise ConfigError for more ranks than cores."""
    cores = available_cores().physical
    if ranks > cores:
        raise ConfigError(f"{ranks} ranks are more than the {cores} cores here, and each wants its own: take {cores}")


def _sums() -> dict[int, int]:
    """Number of sums that a call makes, by their number of values."""
    return {count: max(2, SUMS * COUNTS[0] // count) for count in COUNTS}


def _add(group: RankGroup, count: int) -> None:
    """Sum zeros in place, as the native steps do."""
    x = torch.zeros(count, dtype=torch.bfloat16)
    for _ in range(_sums()[count]):
        native_ops().sum_of_ranks(group.plan, x)


@contextmanager
def _crew(ranks: int) -> Iterator[Mapping[str, Callable[[], object]]]:
    """Start the other ranks, and give rank 0's call for each number of values; the ranks end with the context."""
    segment = torch.frombuffer(mmap.mmap(-1, native_ops().segment_bytes(ranks)), dtype=torch.uint8)
    first, children = os.getpid(), list[int]()
    group: RankGroup | None = None
    try:
        for rank in range(1, ranks):
            with warnings.catch_warnings():  # the child calls nothing that another thread of ours could hold
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                _follow(rank, ranks, segment, first)
            children.append(child)
        group = RankGroup(0, ranks, segment, _peers(dict(enumerate(children, 1)), ranks))
        with share_of_cores(0, ranks):
            yield {str(count): partial(_called, group, count) for count in COUNTS}
            group.of_first([0])
    except BaseException:
        if group is not None:
            group.abandon()
        raise
    finally:
        for child in children:
            if group is None:  # another could not be started, so nobody will call these
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if group is not None:
            for peer in group.peers[1:]:
                os.close(peer)


def _peers(processes: Mapping[int, int], ranks: int) -> list[int]:
    """A pidfd for each rank whose process is known, else -1."""
    return [os.pidfd_open(processes[rank]) if rank in processes else -1 for rank in range(ranks)]


def _called(group: RankGroup, count: int) -> None:
    """Have all ranks sum `count` values, and take part."""
    group.of_first([count])
    _add(group, count)


def _follow(rank: int, ranks: int, segment: torch.Tensor, first: int) -> None:
    """Run another rank: sum as many values as the first one sends, until it sends 0."""
    try:
        group = RankGroup(rank, ranks, segment, _peers({0: first}, ranks))
        with share_of_cores(rank, ranks):
            while count := group.of_first()[0]:
                _add(group, count)
    finally:
        os._exit(0)
