"""Ranks that profile a step together: what each one computes, how long it waits for the others, and what it sends.

Each collective is timed as a part of its own, and waited for at once, so that none of it hides behind a computation.
Until the last rank of its group has begun it, a rank waits; from then on it communicates. This compares the clocks of
the ranks, and so they must be processes of one machine, which share one.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.measure.counted import collective_of, wait_for
from hasten.profiling.meter import Meter
from hasten.profiling.tree import without_numbers


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of a step on one rank.

    part: the part that it is, "update.all-reduce". group: the process group's name. begun, ended: nanoseconds of the
    machine's clock. sent: bytes that the rank sends in a ring.
    """

    part: str
    group: str
    begun: int
    ended: int
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """A part of a step on one rank, its children included: computing + waiting + communicating is all of its time.

    Times are in seconds. exchanges: collectives; sent: bytes that they send.
    """

    name: str
    computing: float
    waiting: float = 0.0
    communicating: float = 0.0
    exchanges: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The parts of a step on one rank, parents before children; the first one is the step."""

    rank: int
    parts: tuple[RankPart, ...]


class Exchanges(TorchDispatchMode):
    """While it is entered, makes each collective a part of the meter's step (`PART.all-gather`), done when it returns.

    found: those since the last `restart`.
    """

    def __init__(self, meter: Meter) -> None:
        from torch.distributed.tensor import DTensor

        super().__init__()
        self.meter, self.divided = meter, DTensor
        self.restart()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled: no collective is inside of one."""
        return True

    def restart(self) -> None:
        """Begin a step."""
        self.found: list[Exchange] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(
            issubclass(kind, self.divided) for kind in types
        ):  # such a tensor calls operators of plain tensors, which come here
            return NotImplemented
        found = collective_of(function, args)
        if found is None:
            return function(*args, **(kwargs or {}))
        meter = self.meter
        outer, phase = meter.now
        part = f"{outer}.{found.kind}" if outer else found.kind
        meter.enter(part, phase)
        begun = meter.marks[-1][2]
        result = function(*args, **(kwargs or {}))
        wait_for(result)
        meter.enter(outer, phase)
        self.found.append(Exchange(part, found.group, begun, meter.marks[-1][2], found.sent))
        return result


def check_clocks(ranks: Ranks) -> None:
    """Raise ConfigError for ranks of several machines."""
    if ranks.local_size != ranks.size:
        raise ConfigError(
            f"a profile of ranks compares their clocks, and these {ranks.size} run on several machines; profile on one "
            "machine (--processes)"
        )


def fastest_of(ranks: Ranks, seconds: Sequence[float]) -> int:
    """The index of the step whose slowest rank took the shortest time. seconds: of this rank's steps."""
    everywhere = [json.loads(text) for text in ranks.texts(json.dumps(list(seconds)))]
    slowest = [max(times) for times in zip(*everywhere, strict=True)]
    return slowest.index(min(slowest))


def times_of_ranks(
    ranks: Ranks, spent: Mapping[tuple[str, str], float], exchanges: Sequence[Exchange]
) -> tuple[RankTimes, ...]:
    """What every rank did in one step, on every rank. spent: this rank's seconds by part and phase."""
    own: defaultdict[str, float] = defaultdict(float)
    for (part, _), seconds in spent.items():
        own[part] += seconds
    texts = ranks.texts(json.dumps({"own": own, "exchanges": [asdict(one) for one in exchanges]}))
    said = [json.loads(text) for text in texts]
    found = [(one["own"], [Exchange(**values) for values in one["exchanges"]]) for one in said]
    return tuple(
        RankTimes(rank=rank, parts=_parts(times, _split(made, last_begun([made for _, made in found]))))
        for rank, (times, made) in enumerate(found)
    )


def last_begun(exchanges: Sequence[Sequence[Exchange]]) -> dict[tuple[str, int], int]:
    """When the last rank began each collective, by its group and its number in that group. exchanges: of each rank."""
    last: dict[tuple[str, int], int] = {}
    for made in exchanges:
        for key, one in _numbered(made):
            last[key] = max(one.begun, last.get(key, 0))
    return last


def _numbered(exchanges: Sequence[Exchange]) -> list[tuple[tuple[str, int], Exchange]]:
    """The collectives with their group and number: all ranks of a group take part in its collectives in one order."""
    count: defaultdict[str, int] = defaultdict(int)
    found = []
    for one in exchanges:
        found.append(((one.group, count[one.group]), one))
        count[one.group] += 1
    return found


def _split(exchanges: Sequence[Exchange], last: Mapping[tuple[str, int], int]) -> list[RankPart]:
    """A rank's collectives, each with the seconds in which it waits for the last rank, and those after them."""
    found = []
    for key, one in _numbered(exchanges):
        waits = min(max(0, last[key] - one.begun), one.ended - one.begun)
        talks = one.ended - one.begun - waits
        found.append(
            RankPart(
                name=one.part, computing=0.0, waiting=waits / 1e9, communicating=talks / 1e9, exchanges=1, sent=one.sent
            )
        )
    return found


def _parts(own: Mapping[str, float], exchanges: Sequence[RankPart]) -> tuple[RankPart, ...]:
    """The rows of a rank's tree. own: seconds of each part without its children."""
    talking = {one.name for one in exchanges}
    leaves = [*exchanges, *(RankPart(name=name, computing=s) for name, s in own.items() if name not in talking)]
    inside: dict[str, list[RankPart]] = {"": []}
    for name in own:  # in the order in which they ran, parents first
        words = name.split(".")
        for depth in range(1, len(words) + 1 if name else 1):
            inside.setdefault(".".join(words[:depth]), [])
    for leaf in leaves:
        words = leaf.name.split(".") if leaf.name else []
        for depth in range(len(words) + 1):
            inside[".".join(words[:depth])].append(leaf)
    return tuple(added_up(name, rows) for name, rows in inside.items())


def folded_parts(parts: Sequence[RankPart]) -> list[RankPart]:
    """Add up a rank's parts that differ only in a number ("blocks.0", "blocks.1") into one ("blocks.*")."""
    alike: dict[str, list[RankPart]] = {}
    for part in parts:
        alike.setdefault(without_numbers(part.name), []).append(part)
    return [added_up(name, own) for name, own in alike.items()]


def added_up(name: str, rows: Sequence[RankPart]) -> RankPart:
    """Add up parts of one rank into one."""
    fields = ("computing", "waiting", "communicating", "exchanges", "sent")
    return RankPart(name=name, **{field: sum(getattr(row, field) for row in rows) for field in fields})
