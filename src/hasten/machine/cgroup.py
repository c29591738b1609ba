"""Limits that a Linux control group (a container, a batch system) puts on this process.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. A limit may sit on any ancestor
of the process's own group, so every level up to the mounted root is read and the tightest counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hasten.machine.files import system_file

# cgroup v1 writes "no limit" as the largest multiple of a page below 2^63; no machine has an exbibyte.
UNLIMITED_BYTES = 1 << 60
# (limit, usage, what the sizes in memory.stat begin with that count the groups below too), of version 2 and 1
MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of the control groups; None where they set none."""

    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    cpus: float | None = None


def read_cgroup_limits(
    *, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> CgroupLimits:
    """Reads the limits of the calling process, both cgroup v2 and v1; all None where there are no control groups."""
    lines = (system_file(membership) or "").splitlines()
    memory: list[tuple[int, int]] = []  # (limit, available) of each level that has a limit
    cpus: list[float] = []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        # Version 1 mounts a hierarchy by its controllers' names, all together or each; version 2 at the root or there.
        mounts = {controllers, *controllers.split(",")} if controllers else {"", "unified"}
        for level in (level for mount in mounts for level in _levels(root / mount, path)):
            memory += _memory(level)
            cpus += _cpus(level)
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
    for level in (folder, *folder.parents):
        if level.is_dir():
            yield level
        if level == mount:
            return


def _number(file: Path) -> int | None:
    word = system_file(file)
    return int(word) if word is not None and word.removeprefix("-").isdecimal() else None


def _memory(level: Path) -> list[tuple[int, int]]:
    for limit_file, usage_file, prefix in MEMORY_FILES:
        limit = _number(level / limit_file)
        if limit is None or not 0 <= limit < UNLIMITED_BYTES:
            continue
        used = _number(level / usage_file) or 0
        # Cached file pages count as used but are given back on demand, as in MemAvailable.
        for line in (system_file(level / "memory.stat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key in (f"{prefix}inactive_file", f"{prefix}active_file") and value.isdecimal():
                used -= int(value)
        return [(limit, max(0, limit - max(0, used)))]
    return []


def _cpus(level: Path) -> list[float]:
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = (system_file(level / "cpu.max") or " ".join(system_file(level / file) or "" for file in files)).split()
    if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
        return [int(words[0]) / int(words[1])]
    return []
