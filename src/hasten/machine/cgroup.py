"""Limits that a Linux control group (a container, a batch system) puts on this process.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. A limit may sit on any ancestor
of the process's own group, so every level up to the mounted root is read and the tightest counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as the largest multiple of a page below 2^63; no machine has an exbibyte.
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """What the control groups allow; None where they set no limit."""

    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    cpus: float | None = None


def read_cgroup_limits(
    *, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> CgroupLimits:
    """Reads the limits of the calling process, both cgroup v2 and v1; all None where there are no control groups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return CgroupLimits()
    memory: list[tuple[int, int]] = []  # (limit, available) of each level that has a limit
    cpus: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in (root, root / "unified"):
                for level in _levels(mount, path):
                    memory += _memory_v2(level)
                    cpus += _cpus_v2(level)
        for controller in controllers.split(","):
            if controller not in ("memory", "cpu"):
                continue
            for mount in (root / controllers, root / controller):
                for level in _levels(mount, path):
                    memory += _memory_v1(level) if controller == "memory" else []
                    cpus += _cpus_v1(level) if controller == "cpu" else []
    return CgroupLimits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_available_bytes=min((available for _, available in memory), default=None),
        cpus=min(cpus, default=None),
    )


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and its ancestors up to the mount; only those that can be seen from inside a container."""
    folder = mount / path.strip("/")
    if ".." in folder.parts:  # a group outside this namespace's root
        folder = mount
    while True:
        if folder.is_dir():
            yield folder
        if folder == mount:
            return
        folder = folder.parent


def _word(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _number(file: Path) -> int | None:
    word = _word(file)
    return int(word) if word is not None and word.removeprefix("-").isdecimal() else None


def _memory(level: Path, *, limit_file: str, usage_file: str, reclaimable: tuple[str, str]) -> list[tuple[int, int]]:
    limit = _number(level / limit_file)
    if limit is None or not 0 <= limit < UNLIMITED_BYTES:
        return []
    used = _number(level / usage_file) or 0
    # Cached file pages count as used but are given back on demand, as in MemAvailable.
    for line in (_word(level / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in reclaimable and value.isdecimal():
            used -= int(value)
    return [(limit, max(0, limit - max(0, used)))]


def _memory_v2(level: Path) -> list[tuple[int, int]]:
    files = ("inactive_file", "active_file")
    return _memory(level, limit_file="memory.max", usage_file="memory.current", reclaimable=files)


def _memory_v1(level: Path) -> list[tuple[int, int]]:
    files = ("total_inactive_file", "total_active_file")
    return _memory(level, limit_file="memory.limit_in_bytes", usage_file="memory.usage_in_bytes", reclaimable=files)


def _cpus_v2(level: Path) -> list[float]:
    quota, _, period = (_word(level / "cpu.max") or "max").partition(" ")
    return [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() and int(period) else []


def _cpus_v1(level: Path) -> list[float]:
    quota, period = _number(level / "cpu.cfs_quota_us"), _number(level / "cpu.cfs_period_us")
    return [quota / period] if quota and quota > 0 and period else []
