"""Tensor parallelism in inference: one model over several processes. See docs/parallel-inference.md."""

from collections.abc import Iterator
from contextlib import contextmanager

from hasten import __version__
from hasten.distributed.ranks import Ranks
from hasten.distributed.shared_memory import open_group
from hasten.machine.threads import share_of_cores
from hasten.ops.collective import RankGroup

_current: list[RankGroup] = []


@contextmanager
def tensor_parallel(ranks: Ranks) -> Iterator[RankGroup | None]:
    """Open the group of the ranks, for `hasten.load(…, group=…)`; None for a single process.

    Inside the context each rank uses its part of the machine's cores. If one fails there, the others end with an error
    instead of waiting for it. Raises ConfigError if the ranks run different versions of hasten.
    """
    if ranks.size == 1:
        yield None
        return
    ranks.require_same({"version of hasten": __version__})
    group = open_group(ranks)
    _current.append(group)
    try:
        with share_of_cores(ranks.local_rank, ranks.local_size):
            yield group
    except BaseException:
        group.abandon()
        raise
    finally:
        _current.remove(group)


def current_group() -> RankGroup | None:
    """The group of the innermost open `tensor_parallel`, or None."""
    return _current[-1] if _current else None


@contextmanager
def without_group() -> Iterator[None]:
    """Inside the context models are loaded whole, by this rank alone."""
    held = list(_current)
    _current.clear()
    try:
        yield
    finally:
        _current.extend(held)
