import gc
import mmap
from pathlib import Path

import numpy
import pytest

from hasten.machine import available_memory, peak_memory, process_memory, reset_peak_memory
from hasten.machine.cgroup import CgroupLimits
from peak_memory import PeakMemory

MIB = 1 << 20


def touch_fresh(size: int) -> None:
    """Takes memory from the system and gives it back. A heap may have as much that it kept."""
    with mmap.mmap(-1, size) as fresh:
        for page in range(0, size, mmap.PAGESIZE):
            fresh[page] = 1


def test_available_memory_respects_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory() > 0
    limit = CgroupLimits(memory_bytes=300 * MIB, memory_available_bytes=7 * MIB)
    monkeypatch.setattr("hasten.machine.memory.read_cgroup_limits", lambda: limit)
    assert available_memory() == 7 * MIB


def test_the_peak_is_never_below_what_is_used_now() -> None:
    assert peak_memory() >= process_memory() - MIB > 0


def test_peak_memory_sees_what_was_given_back() -> None:
    gc.collect()  # what earlier tests left is given back before, not during
    with PeakMemory() as peak:
        assert (peak.bytes, peak.exact) == (0, False)
        touch_fresh(200 * MIB)
    if not peak.exact:
        pytest.skip("an earlier peak cannot be reset on this system")
    assert 190 * MIB < peak.bytes < 260 * MIB
    first = peak.bytes
    with PeakMemory() as small:
        numpy.ones(20 * MIB // 8)
    assert small.bytes < first
    assert peak.bytes == first, "the figure does not move after the block"


def test_where_the_peak_cannot_be_reset_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy.ones(100 * MIB // 8)
    monkeypatch.setattr("hasten.machine.memory.CLEAR_REFS", tmp_path / "no" / "clear_refs")
    assert reset_peak_memory() is False
    with PeakMemory() as peak:
        pass
    assert not peak.exact
    size = peak_memory() - process_memory() + 100 * MIB
    with PeakMemory() as higher:
        touch_fresh(size)
    assert higher.exact, "a peak above every earlier one is the block's own"
