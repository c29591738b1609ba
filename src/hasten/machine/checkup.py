"""Checks whether everything that hasten can use is here. Each finding says what it means and how to fix it."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hasten.machine.caches import ADVICE, cache_root, why_not_writable
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
    "tensorboard": ("hasten train --run.tensorboard", "pip install 'hasten[tensorboard]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `status` is "ok", "note" (works, but slower or less) or "missing"; `fix`: what to do."""

    name: str
    status: str
    found: str
    fix: str = ""


def finding(name: str, found: str, *, note: str = "", missing: str = "") -> Finding:
    """Make a Finding: `missing` or `note` is what to do; without either the status is "ok"."""
    return Finding(name, "missing" if missing else "note" if note else "ok", found, missing or note)


def check_machine(machine: Machine, *, prebuilt: bool = False) -> list[Finding]:
    """Check everything but speeds (see check_rates). prebuilt: the native kernels need no compiler."""
    return [
        _torch(machine),
        *_compiler(machine, prebuilt),
        _instruction_sets(machine),
        _precision(),
        _gpu(machine),
        _cores(),
        _busy(),
        _memory(machine),
        _cache(),
        *_packages(),
    ]


def check_rates(rates: Mapping[str, float]) -> list[Finding]:
    """Report dtypes that are slower than float32, from measured matrix rates of the CPU (FLOP/s by dtype name)."""
    base = rates.get("float32", 0.0)
    found: list[Finding] = []
    for name in ("bfloat16", "float16", "int8"):
        rate, what = rates.get(name), f"{name} products"
        if rate is None:
            found.append(finding(what, "this torch cannot multiply it on the CPU", note="it is not used"))
        elif rate < base:
            found.append(finding(what, f"{rate / base:.2g} times the rate of float32", note=_what_to_do(name)))
    return found


def _what_to_do(name: str) -> str:
    """Explain to the user that products in a dtype are slow; the commands avoid them by themselves."""
    if name == "int8":
        return "PyTorch's; the native kernels have their own"
    if emulated(name) is None:
        return "nothing: the product that decides is not clearly slower, so it is used"
    return f"nothing: training takes another dtype by itself, and {name} weights are multiplied in float32"


def _torch(machine: Machine) -> Finding:
    version = machine.versions.get("torch", "unknown")
    numbers = tuple(int(word) for word in version.split("+")[0].split(".")[:2] if word.isdecimal())
    built = f"{version}, built for {'CUDA ' + machine.cuda if machine.cuda else 'CPU only'}"
    old = "hasten needs torch 2.11 or newer: pip install -U torch"
    return finding("torch", built, missing=old if numbers < OLDEST_TORCH else "")


def _compiler(machine: Machine, prebuilt: bool) -> Iterator[Finding]:
    fix = "apt install g++ / dnf install gcc-c++ / xcode-select --install, or point CXX at one"
    if machine.compiler is not None:
        yield finding("C++ compiler", machine.compiler)
    elif prebuilt:
        yield finding("C++ compiler", "none: no torch.compile on the CPU", note=fix)
    else:
        yield finding("C++ compiler", "none: no native kernels, no torch.compile on the CPU", missing=fix)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        fix = f"apt install python{sys.version_info.major}.{sys.version_info.minor}-dev (or python3-devel)"
        yield finding("Python headers", "no Python.h: torch.compile cannot build its CPU kernels", missing=fix)


def _instruction_sets(machine: Machine) -> Finding:
    have = machine.instruction_sets
    listed = ", ".join(have) or "none of those that kernels ask for"
    if platform.machine().lower() in ("arm64", "aarch64"):
        return Finding("instruction sets", "ok" if {"asimd", "neon"} & set(have) else "note", listed)
    if "avx2" not in have:
        return finding("instruction sets", listed, note="no AVX2: plain and slow everywhere; use a newer processor")
    lacking = [name for name in ("avx512f", "avx512_vnni", "avx512_bf16") if name not in have]
    if lacking:
        listed += f"; not {', '.join(lacking)}"
    slow = "bfloat16" if lacking == ["avx512_bf16"] else "int8 and bfloat16"
    fix = f"{slow} products run at a part of the rate; a virtual machine may hide them from its guest"
    return finding("instruction sets", listed, note=fix if lacking else "")


def _precision() -> Finding:
    """The dtype that `auto` chooses on the CPU, by the same rule as the commands."""
    choice = training_precision()
    fix = "nothing: training and readable layers take float32 by themselves, stored weights keep their dtype"
    return finding("precision", f"training in {choice}", note=fix if choice.dtype != "bfloat16" else "")


def _gpu(machine: Machine) -> Finding:
    if machine.gpus:
        text = "; ".join(f"{g.name}, {g.memory_bytes / GIB:.0f} GiB, sm_{g.capability}" for g in machine.gpus)
        if "triton" not in machine.versions:
            return finding("GPU", f"{text}; no triton", note="torch.compile needs it on a GPU: pip install triton")
        return finding("GPU", text)
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia/version").exists():
        return finding("GPU", "none; everything runs on the CPU")
    if machine.cuda is None:
        return finding("GPU", "an NVIDIA driver, but torch is built for the CPU", missing="pip install a CUDA torch")
    return finding("GPU", "an NVIDIA driver, but torch sees no GPU", missing="look at nvidia-smi and its version")


def _cores() -> Finding:
    cores = available_cores()
    text = f"{cores.physical} physical, {cores.logical} logical cores for this process"
    limited = cores.quota is not None and cores.quota < (os.cpu_count() or 1)
    if limited:
        text += f" (limited to {cores.quota:.1f} processors' time)"
    return finding("cores", text, note="raise the container's CPU limit for more speed" if limited else "")


def _busy() -> Finding:
    from hasten.machine.contention import CONTENDED, used_by_others

    others = used_by_others()
    if others < CONTENDED:
        return finding("other programs", "leave the cores to this one")
    fix = "close them for full speed; generating and training leave them the cores they use"
    return finding("other programs", f"use {others:.1f} of these cores", note=fix)


def _memory(machine: Machine) -> Finding:
    text = f"{machine.memory_available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB available"
    fix = "the demo needs about 4 GiB: close something or use smaller models"
    return finding("memory", text, note=fix if machine.memory_available_bytes < 4 * GIB else "")


def _cache() -> Finding:
    if (why := why_not_writable("native")) is not None:
        return finding("cache folder", "cannot be written", note=f"{why}; {ADVICE}")
    free = shutil.disk_usage(cache_root()).free
    text = f"writable, {free / GIB:.1f} GiB free on its disk"
    fix = "make room, or set HASTEN_CACHE to a folder on another disk"
    return finding("cache folder", text, note=fix if free < 5 * GIB else "")


def _packages() -> Iterator[Finding]:
    installed = installed_versions(tuple(OPTIONAL_PACKAGES))
    for name, (purpose, fix) in OPTIONAL_PACKAGES.items():
        text = installed.get(name, f"not installed; for {purpose}")
        yield finding(f"{name} (optional)", text, note=fix if name not in installed else "")
