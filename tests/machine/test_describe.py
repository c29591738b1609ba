import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hasten.machine import available_cores, describe, find_compiler, instruction_sets
from hasten.machine.processor import arm_features, processor_name
from hasten.measure.table import machine_line

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse avx2 fma avx512f avx512_vnni amx_int8 amx_tile amx_bf16

processor\t: 1
model name\t: something else
"""
GRACE = """processor\t: 0
Features\t: fp asimd asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def test_importing_the_room_does_not_import_torch() -> None:
    code = "import sys, hasten.machine; sys.exit('torch' in sys.modules or 'psutil' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_processors_are_read_from_the_kernels_list(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(XEON)
    assert processor_name(cpuinfo) == "Intel(R) Xeon(R) Platinum 8480+"
    expected = ("avx2", "fma", "avx512f", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16")
    assert instruction_sets(cpuinfo) == expected
    cpuinfo.write_text(GRACE)
    assert processor_name(cpuinfo) == "Arm Neoverse V2"
    assert instruction_sets(cpuinfo) == ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve")


def test_arm_features_are_read_from_the_words_that_linux_gives() -> None:
    """Those of a Neoverse N1 and a Neoverse V1, and of one that has only what every processor of 64 bits has."""
    assert arm_features(0x119FFF, 0) == ("asimd", "asimdhp", "asimddp")
    assert arm_features(0x119FFF | 1 << 22, 1 << 13 | 1 << 14) == ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve")
    assert arm_features(0x3, 0) == ("asimd",)


def test_without_the_kernels_list_torch_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert "avx512f" in instruction_sets(tmp_path / "missing")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert instruction_sets(tmp_path / "missing") == ("avx2", "fma")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert instruction_sets(tmp_path / "missing") == ("neon",)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_cores_follow_the_affinity_mask() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        cores = available_cores()
        assert (cores.physical, cores.logical) == (1, 1)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_a_thread_that_openmp_bound_says_nothing_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    cores = available_cores()
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    try:
        os.sched_setaffinity(0, {min(before)})
        assert len(before) != os.cpu_count() or available_cores() == cores
    finally:
        os.sched_setaffinity(0, before)


def test_cores_follow_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.machine.cgroup import CgroupLimits

    monkeypatch.setattr("hasten.machine.processor.read_cgroup_limits", lambda: CgroupLimits(cpus=0.3))
    assert available_cores().logical == available_cores().physical == 1
    assert available_cores().quota == 0.3


def test_the_description_is_complete_json_without_private_names() -> None:
    machine = describe()
    text = json.dumps(machine.to_json())
    back = json.loads(text)
    assert back["logical_cores"] >= back["physical_cores"] >= 1
    assert 0 < back["memory_available_bytes"] <= back["memory_bytes"]
    assert back["versions"]["torch"]
    assert back["versions"]["hasten"]
    assert isinstance(back["instruction_sets"], list)
    private = [socket.gethostname(), str(Path.home()), str(Path(__file__).parent)]
    # "root" or "vm" may be a part of an ordinary word
    private += [getpass.getuser()] if len(getpass.getuser()) > 6 else []
    assert not [name for name in private if len(name) > 4 and name in text]


def test_a_gpu_is_described_with_its_clocks_and_power_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the driver's tool and torch's properties: two GPUs, which torch counts the other way round."""
    fake = tmp_path / "nvidia-smi"
    rows = "GPU-aa, 1410, 1980, 2619, 2619, 330.00", "GPU-bb, 345, [N/A], 2619, 2619, 700.00"
    fake.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    fake.chmod(0o755)
    properties = [SimpleNamespace(name=f"NVIDIA {u}", total_memory=9, major=9, minor=0, uuid=u) for u in ("bb", "aa")]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties[index])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = describe().to_json()["gpus"]
    assert (first["name"], first["clock_mhz"], first["power_limit_watts"]) == ("NVIDIA bb", 345, 700)
    assert first["highest_clock_mhz"] is None
    assert (second["clock_mhz"], second["highest_clock_mhz"], second["memory_clock_mhz"]) == (1410, 1980, 2619)
    assert machine_line({"gpus": [second], "versions": {"torch": "2"}}, "cuda") == "NVIDIA aa, at most 330 W, torch 2"
    fake.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert describe().gpus[0].power_limit_watts is None


def test_the_compiler_is_found_through_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mycxx"
    fake.write_text("#!/bin/sh\necho 'Debian clang version 14.0.6 (thing 9.9)'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    found = find_compiler()
    assert found is not None
    assert (found.kind, found.version, found.command) == ("clang++", "14.0.6", str(fake))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
