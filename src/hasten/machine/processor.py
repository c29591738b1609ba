"""The processor: its name, the cores this process may use, its caches and the instruction sets kernels ask for."""

import ctypes
import functools
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hasten.machine.cgroup import read_cgroup_limits
from hasten.machine.files import system_file

CPUINFO = Path("/proc/cpuinfo")
CPU_FOLDER = Path("/sys/devices/system/cpu")

# What some kernel of ours or of PyTorch asks for, by the names Linux gives them. AVX-VNNI is the 256-bit form.
RELEVANT_INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("neon", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)

# The same of Arm's: bits of the words that Linux gives each process, AT_HWCAP and AT_HWCAP2 (asm/hwcap.h).
HWCAP = {"asimd": 1, "asimdhp": 10, "asimddp": 20, "sve": 22}
HWCAP2 = {"sve2": 1, "i8mm": 13, "bf16": 14, "sme": 23}

# Arm processors are named by numbers only: (implementer, part) from Arm's Technical Reference Manuals.
ARM_NAMES = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0xc0", "0xac3"): "Ampere-1",
}


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores this process may use: its affinity mask, cut by the control group's quota."""

    physical: int
    logical: int
    quota: float | None  # processors' worth of time allowed by the control group; None: no limit


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's model name, "unknown" where the system does not tell."""
    fields = _first_processor(cpuinfo)
    if name := fields.get("model name", "").strip():
        return name
    if arm_name := ARM_NAMES.get((fields.get("CPU implementer", ""), fields.get("CPU part", ""))):
        return arm_name
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if answer:
            return answer
    return platform.processor() or "unknown"


def instruction_sets(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """The relevant instruction sets that this processor has, in a fixed order.

    From the kernel's list on Linux (which leaves out what the system does not let programs use; on Arm from the words
    that it gives this process, which an emulator sets too); elsewhere from what torch found.
    """
    if cpuinfo == CPUINFO and sys.platform.startswith("linux") and platform.machine() == "aarch64":
        auxiliary = ctypes.CDLL(None).getauxval
        auxiliary.restype, auxiliary.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
        return arm_features(auxiliary(16), auxiliary(26))
    fields = _first_processor(cpuinfo)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    if flags:
        return tuple(name for name in RELEVANT_INSTRUCTION_SETS if name in flags)
    if platform.machine().lower() in ("arm64", "aarch64"):
        return ("neon",)
    import torch

    capability = torch.backends.cpu.get_cpu_capability().upper()
    if "AVX512" in capability:
        return ("avx2", "fma", "avx512f", "avx512bw", "avx512vl")
    return ("avx2", "fma") if "AVX2" in capability else ()


def arm_features(hwcap: int, hwcap2: int) -> tuple[str, ...]:
    """The relevant instruction sets of an Arm processor, in a fixed order, from its AT_HWCAP and AT_HWCAP2."""
    words = ((HWCAP, hwcap), (HWCAP2, hwcap2))
    found = {name for bits, word in words for name, bit in bits.items() if word >> bit & 1}
    return tuple(name for name in RELEVANT_INSTRUCTION_SETS if name in found)


@functools.cache
def amx_permitted() -> bool:
    """Whether Linux lets this process use AMX's tiles: asked for once, for all threads, and inherited by children.

    The system call and its numbers: Linux's Documentation/arch/x86/xstate.rst.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data) == 0


def available_cores() -> Cores:
    """The physical and logical cores this process may use (at least 1 each)."""
    import psutil

    everything = set(range(os.cpu_count() or 1))
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything
    if len(affinity) == 1 and any(os.environ.get(name) for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY")):
        affinity = everything  # OpenMP has bound this thread to its core: that says nothing of the others
    logical = max(1, len(affinity))
    places = {_core_place(number) for number in affinity}
    physical = (psutil.cpu_count(logical=False) or logical) if None in places else len(places)
    quota = read_cgroup_limits().cpus
    if quota is not None:
        logical = min(logical, max(1, math.ceil(quota)))
    return Cores(physical=min(physical, logical), logical=logical, quota=quota)


@functools.cache
def last_level_cache_bytes() -> int:
    """The size in bytes of all last-level (L3, else L2) caches together; 0 where the system does not tell."""
    for index in ("index3", "index2"):
        sizes: dict[str, int] = {}  # by the processors that share one cache
        for folder in CPU_FOLDER.glob(f"cpu[0-9]*/cache/{index}"):
            size = (system_file(folder / "size") or "").removesuffix("K")
            if size.isdecimal():
                sizes[system_file(folder / "shared_cpu_list") or ""] = int(size) << 10
        if sizes:
            return sum(sizes.values())
    return 0


def by_cores(processors: Iterable[int]) -> list[list[int]]:
    """Group processors by core, ordered by socket; a processor whose core is unknown is a group of its own."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number in sorted(processors):
        place = _core_place(number)
        found.setdefault((number,) if place is None else (int(place[0]), int(place[1])), []).append(number)
    return [found[place] for place in sorted(found)]


def _core_place(number: int) -> tuple[str, str] | None:
    folder = CPU_FOLDER / f"cpu{number}" / "topology"
    package, core = (system_file(folder / name) for name in ("physical_package_id", "core_id"))
    return None if package is None or core is None else (package, core)


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """The `key : value` lines of the first processor in /proc/cpuinfo; empty elsewhere than on Linux."""
    return _this_processor() if cpuinfo == CPUINFO else _read_first(cpuinfo)


@functools.cache
def _this_processor() -> dict[str, str]:
    return _read_first(CPUINFO)


def _read_first(cpuinfo: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in (system_file(cpuinfo) or "").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields
