"""Describes this machine for published measurements, without names of hosts, users or folders."""

import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hasten.machine.compiler import find_compiler
from hasten.machine.memory import available_memory, total_memory
from hasten.machine.processor import available_cores, instruction_sets, processor_name

# Packages whose version can change a speed or a result.
PACKAGES = ("hasten", "torch", "transformers", "triton", "numpy", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: name, memory in bytes, compute capability ("9.0"), and for NVIDIA's clocks and power limit.

    Clocks in MHz, of the multiprocessors and of the memory: present and maximum; the power limit in watts.
    """

    name: str
    memory_bytes: int
    capability: str
    clock_mhz: float | None = None
    highest_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    highest_memory_clock_mhz: float | None = None
    power_limit_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement. Cores and memory are those that this process may use."""

    cpu: str
    architecture: str
    physical_cores: int
    logical_cores: int
    instruction_sets: tuple[str, ...]
    memory_bytes: int
    memory_available_bytes: int
    system: str
    python: str
    versions: dict[str, str]  # of the packages that are installed
    cuda: str | None  # the CUDA (or ROCm) version torch was built for
    compiler: str | None
    gpus: tuple[Gpu, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self) | {"instruction_sets": list(self.instruction_sets)}


def describe() -> Machine:
    """Describe the machine now. Imports torch (for the GPUs); measures nothing."""
    import torch

    cores = available_cores()
    compiler = find_compiler()
    return Machine(
        cpu=processor_name(),
        architecture=platform.machine(),
        physical_cores=cores.physical,
        logical_cores=cores.logical,
        instruction_sets=instruction_sets(),
        memory_bytes=total_memory(),
        memory_available_bytes=available_memory(),
        system=f"{platform.system()} {platform.release().split('-')[0]}",
        python=platform.python_version(),
        versions=installed_versions(PACKAGES),
        cuda=torch.version.cuda or torch.version.hip,
        compiler=str(compiler) if compiler else None,
        gpus=_gpus(),
    )


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions by package name, of those that are installed; imports none of them."""
    versions: dict[str, str] = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    rates, found = _rates(), []
    for index in range(torch.cuda.device_count()):
        own = torch.cuda.get_device_properties(index)
        uuid = str(getattr(own, "uuid", "")).removeprefix("GPU-")
        found.append(Gpu(own.name, own.total_memory, f"{own.major}.{own.minor}", *rates.get(uuid, ())))
    return tuple(found)


def _rates() -> dict[str, tuple[float | None, ...]]:
    """Clocks and power limits of `Gpu` by GPU uuid, from nvidia-smi; {} if there is none."""
    fields = "uuid,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in said.splitlines():
        uuid, *numbers = (part.strip() for part in line.split(","))
        known = (float(x) if re.fullmatch(r"[\d.]+", x) else None for x in numbers)  # "[N/A]"
        found[uuid.removeprefix("GPU-")] = tuple(known)
    return found
