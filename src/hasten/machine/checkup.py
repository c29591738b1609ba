"""Is everything here that hasten can use? Each finding says what it means and how to mend it."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import ResourceError
from hasten.machine.caches import cache_folder
from hasten.machine.describe import Machine, installed_versions
from hasten.machine.precision import emulated, training_precision
from hasten.machine.processor import available_cores

GIB = 1 << 30
OLDEST_TORCH = (2, 11)
# package -> (what it is for, how to get it)
OPTIONAL_PACKAGES = {
    "transformers": ("comparing with transformers in the tests", "pip install 'hasten[test]'"),
    "datasets": ("a Hugging Face datasets id as a text source", "pip install 'hasten[datasets]'"),
    "lm_eval": ("hasten eval --tasks", "pip install 'hasten[eval]'"),
    "tensorboard": ("hasten train --tensorboard", "pip install 'hasten[tensorboard]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `status` is "ok", "note" (works, but slower or less) or "missing"; `mend`: what to do."""

    name: str
    status: str
    found: str
    mend: str = ""


def check_machine(machine: Machine) -> list[Finding]:
    """Looks at everything but speeds (see check_rates)."""
    return [
        _torch(machine),
        *_compiler(machine),
        _instruction_sets(machine),
        _precision(),
        _gpu(machine),
        _cores(),
        _memory(machine),
        _cache(),
        *_packages(),
    ]


def check_rates(rates: Mapping[str, float]) -> list[Finding]:
    """Which dtypes are slower than float32, from the measured matrix rates of the CPU (FLOP/s by dtype name)."""
    base = rates.get("float32", 0.0)
    found: list[Finding] = []
    for name in ("bfloat16", "float16", "int8"):
        rate = rates.get(name)
        if rate is None:
            text = "this torch cannot multiply it on the CPU"
            found.append(Finding(f"{name} products", "note", text, "it is not used"))
        elif rate < base:
            text = f"{rate / base:.2g} times the rate of float32"
            found.append(Finding(f"{name} products", "note", text, _what_to_do(name)))
    return found


def _what_to_do(name: str) -> str:
    """What slow products in a dtype mean for a user: the commands see to it by themselves."""
    if name == "int8":
        return "PyTorch's; the native kernels have their own"
    if emulated(name) is None:
        return "nothing: the product that decides is not clearly slower, so it is used"
    return f"nothing: training takes another dtype by itself, and {name} weights are multiplied in float32"


def _torch(machine: Machine) -> Finding:
    version = machine.versions.get("torch", "unknown")
    numbers = tuple(int(word) for word in version.split("+")[0].split(".")[:2] if word.isdecimal())
    built = f"{version}, built for {'CUDA ' + machine.cuda if machine.cuda else 'CPU only'}"
    if numbers < OLDEST_TORCH:
        return Finding("torch", "missing", built, "hasten needs torch 2.11 or newer: pip install -U torch")
    return Finding("torch", "ok", built)


def _compiler(machine: Machine) -> Iterator[Finding]:
    if machine.compiler is None:
        mend = "apt install g++ / dnf install gcc-c++ / xcode-select --install, or point CXX at one"
        yield Finding("C++ compiler", "missing", "none: no native kernels, no torch.compile on the CPU", mend)
    else:
        yield Finding("C++ compiler", "ok", machine.compiler)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        mend = f"apt install python{sys.version_info.major}.{sys.version_info.minor}-dev (or python3-devel)"
        yield Finding("Python headers", "missing", "no Python.h: torch.compile cannot build its CPU kernels", mend)


def _instruction_sets(machine: Machine) -> Finding:
    have = machine.instruction_sets
    listed = ", ".join(have) or "none of those that kernels ask for"
    if platform.machine().lower() in ("arm64", "aarch64"):
        return Finding("instruction sets", "ok" if {"asimd", "neon"} & set(have) else "note", listed)
    if "avx2" not in have:
        return Finding("instruction sets", "note", listed, "no AVX2: plain and slow everywhere; use a newer processor")
    lacking = [name for name in ("avx512f", "avx512_vnni", "avx512_bf16") if name not in have]
    if lacking:
        listed += f"; not {', '.join(lacking)}"
    mend = "int8 and bfloat16 products run at a part of the rate; a virtual machine may hide them from its guest"
    return _unless(bool(lacking), "instruction sets", listed, mend)


def _precision() -> Finding:
    """What `auto` takes on the CPU, by the same rule as the commands."""
    choice = training_precision()
    mend = "nothing: training and readable layers take float32 by themselves, stored weights keep their dtype"
    return _unless(choice.dtype != "bfloat16", "precision", f"training in {choice}", mend)


def _gpu(machine: Machine) -> Finding:
    if machine.gpus:
        text = "; ".join(f"{g.name}, {g.memory_bytes / GIB:.0f} GiB, sm_{g.capability}" for g in machine.gpus)
        if "triton" not in machine.versions:
            return Finding("GPU", "note", f"{text}; no triton", "torch.compile needs it on a GPU: pip install triton")
        return Finding("GPU", "ok", text)
    driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    if driver and machine.cuda is None:
        return Finding(
            "GPU", "missing", "an NVIDIA driver, but torch is built for the CPU only", "pip install a CUDA torch"
        )
    if driver:
        return Finding(
            "GPU", "missing", "an NVIDIA driver, but torch sees no GPU", "look at nvidia-smi and its version"
        )
    return Finding("GPU", "ok", "none; everything runs on the CPU")


def _cores() -> Finding:
    cores = available_cores()
    text = f"{cores.physical} physical, {cores.logical} logical cores for this process"
    limited = cores.quota is not None and cores.quota < (os.cpu_count() or 1)
    if limited:
        text += f" (limited to {cores.quota:.1f} processors' time)"
    return _unless(limited, "cores", text, "raise the container's CPU limit for more speed")


def _memory(machine: Machine) -> Finding:
    text = f"{machine.memory_available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB available"
    mend = "the demo needs about 4 GiB: close something or use smaller models"
    return _unless(machine.memory_available_bytes < 4 * GIB, "memory", text, mend)


def _cache() -> Finding:
    try:
        free = shutil.disk_usage(cache_folder("native")).free
    except ResourceError as error:
        return Finding("cache folder", "missing", "cannot be used", str(error))
    text = f"writable, {free / GIB:.1f} GiB free on its disk"
    mend = "make room, or set HASTEN_CACHE to a folder on another disk"
    return _unless(free < 5 * GIB, "cache folder", text, mend)


def _unless(short: bool, name: str, found: str, mend: str) -> Finding:
    """Everything is well unless something is short; then a note says how to mend it."""
    return Finding(name, "note", found, mend) if short else Finding(name, "ok", found)


def _packages() -> Iterator[Finding]:
    installed = installed_versions(tuple(OPTIONAL_PACKAGES))
    for name, (purpose, mend) in OPTIONAL_PACKAGES.items():
        if name in installed:
            yield Finding(f"{name} (optional)", "ok", installed[name])
        else:
            yield Finding(f"{name} (optional)", "note", f"not installed; for {purpose}", mend)
