"""Control groups read from files laid out as the kernel lays them out."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hasten.machine.cgroup import CgroupLimits, read_cgroup_limits

GIB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def limits(tmp_path: Path, membership: str) -> CgroupLimits:
    (tmp_path / "cgroup").write_text(membership)
    return read_cgroup_limits(membership=tmp_path / "cgroup", root=tmp_path / "fs")


def test_version_2_takes_the_tightest_level(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root, cgroup__procs="1")
    write(root / "pod", memory__max=str(8 * GIB), memory__current=str(7 * GIB), cpu__max="400000 100000")
    write(root / "pod" / "box", memory__max=str(4 * GIB), memory__current=str(GIB), cpu__max="150000 100000")
    found = limits(tmp_path, "0::/pod/box\n")
    assert found == CgroupLimits(memory_bytes=4 * GIB, memory_available_bytes=GIB, cpus=1.5)


def test_file_pages_are_available(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem 3"
    write(tmp_path / "fs", memory__max=str(4 * GIB), memory__current=str(3 * GIB), memory__stat=stat)
    assert limits(tmp_path, "0::/\n").memory_available_bytes == 3 * GIB


def test_version_2_without_limits(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max="max", memory__current="5", cpu__max="max 100000")
    assert limits(tmp_path, "0::/\n") == CgroupLimits()


def test_a_group_seen_from_inside_a_container_falls_back_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max=str(GIB), memory__current="0", cpu__max="50000 100000")
    for path in ("/docker/0123", "/../sibling"):
        assert limits(tmp_path, f"0::{path}\n") == CgroupLimits(GIB, GIB, 0.5)


def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="1")
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}"
    write(
        root / "memory" / "job",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB + 5),
        memory__stat=stat,
    )
    write(root / "cpu,cpuacct" / "job", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    write(root / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    found = limits(tmp_path, "9:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/\n0::/\n")
    assert found == CgroupLimits(memory_bytes=2 * GIB, memory_available_bytes=2 * GIB - 5, cpus=2.5)


def test_no_control_groups(tmp_path: Path) -> None:
    assert read_cgroup_limits(membership=tmp_path / "missing", root=tmp_path) == CgroupLimits()


@example(membership="0::/", content="²")  # a digit, and no number
@example(membership="0::/", content="--5")
@given(membership=st.text(alphabet="0:/.abcpumemory,\n", max_size=60), content=st.text(max_size=20))
def test_odd_files_never_break_the_reader(
    membership: str, content: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("odd")
    write(tmp_path / "fs", memory__max=content, cpu__max=content)
    found = limits(tmp_path, membership)
    assert found.memory_bytes is None or found.memory_bytes >= 0
