"""The tree of a profile: the time of each part of a step, beside the least time possible on this machine."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hasten.ops.linear.modules import PackedLinear
from hasten.profiling.meter import BACKWARD, FORWARD
from hasten.profiling.walk import ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """A part of a step, its children included. forward, backward: seconds. bytes: the least that have to be moved.

    limit: for a leaf, the seconds of its FLOPs at the matrix rate or of its bytes at the bandwidth, the longer one;
    else the sum of its leaves. count: leaves of this name that were added up. leaf: it has no children. note: why the
    profile does not look into it.
    """

    name: str
    parameters: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    limit: float = 0.0
    count: int = 1
    leaf: bool = True
    note: str | None = None

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def share(self) -> float:
        """limit over seconds: 1 is the machine's limit."""
        return self.limit / self.seconds if self.seconds else 0.0

    @property
    def lost(self) -> float:
        """Seconds above the limit: what could be gained."""
        return max(0.0, self.seconds - self.limit)


def tree(
    parts: Sequence[ModelPart],
    seconds: Mapping[tuple[str, str], float],
    least: Mapping[str, tuple[float, float]],
    *,
    rate: float | None,
    bandwidth: float,
) -> tuple[PartTime, ...]:
    """The rows of a step, parents before children, "" (the step) first. "X.itself" and "between" are the rest of each.

    seconds: each part's own time by phase. least: its own FLOPs and bytes; rate and bandwidth: of both, per second.
    """
    numbers, notes = parameters_of(parts), {part.name: part.note for part in parts}
    names = dict.fromkeys([*notes, *(name for name, _ in seconds)])
    inside: dict[str, list[PartTime]] = {}
    for name in names:
        forward, backward = (seconds.get((name, phase), 0.0) for phase in (FORWARD, BACKWARD))
        if not (forward or backward or numbers.get(name)):
            continue
        outer = not name or any(other.startswith(f"{name}.") for other in names)
        flops, moved = least.get(name, (0.0, 0.0)) if forward or backward else (0.0, 0.0)
        leaf = PartTime(
            name=f"{name}.itself" if outer and name else name or "between",
            parameters=numbers.get(name, 0),
            flops=flops,
            bytes=moved,
            forward=forward,
            backward=backward,
            limit=max(flops / rate if rate else 0.0, moved / bandwidth),
        )
        words = leaf.name.split(".")
        for depth in range(len(words) + 1):
            inside.setdefault(".".join(words[:depth]), []).append(leaf)
    return tuple(added(name, own, leaf=own[0].name == name, note=notes.get(name)) for name, own in inside.items())


def added(name: str, rows: Sequence[PartTime], **more: Any) -> PartTime:
    """Add up rows into one."""
    fields = ("parameters", "flops", "bytes", "forward", "backward", "limit", "count")
    return PartTime(name=name, **{field: sum(getattr(row, field) for row in rows) for field in fields}, **more)


def folded(rows: Iterable[PartTime]) -> list[PartTime]:
    """Add up parts that differ only in a number ("blocks.0", "blocks.1") into one ("blocks.*")."""
    alike: dict[str, list[PartTime]] = {}
    for row in rows:
        alike.setdefault(without_numbers(row.name), []).append(replace(row, count=1))
    return [added(name, own, leaf=own[0].leaf, note=own[0].note) for name, own in alike.items()]


def without_numbers(name: str) -> str:
    """A part's name with a star in the place of each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def ordered(rows: Sequence[PartTime], by: str) -> list[PartTime]:
    """Order rows: "tree" keeps the order but drops rows without time; "gain", "time": the leaves, largest first."""
    if by == "tree":
        return [row for row in rows if row.parameters or row.seconds > rows[0].seconds / 1000]
    leaves = [row for row in rows if row.leaf and row.seconds]
    return sorted(leaves, key=lambda row: row.lost if by == "gain" else row.seconds, reverse=True)


def parameters_of(parts: Iterable[ModelPart]) -> dict[str, int]:
    """Number of parameters of each part; shared ones count once, at the first part, packed ones as unpacked."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for part in parts:
        for module in part.modules:
            own = {id(weight): weight.numel() for weight in module.parameters(recurse=False)}
            if isinstance(module, PackedLinear):
                own = {id(module.data): module.out_features * (module.in_features + (module.bias is not None))}
            found[part.name] = found.get(part.name, 0) + sum(n for which, n in own.items() if which not in seen)
            seen |= own.keys()
    return found
