"""Known devices to plan for: their data sheets, and the share of those limits that is commonly reached."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hasten.errors import ConfigError
from hasten.machine.limits import Limits, Link

# Latencies of GPUs and networks: NCCL's own model of a ring of small pieces (NVIDIA/nccl, src/graph/tuning.cc). Their
# bytes/s: for NVLink what NCCL reaches in one direction (370 of 450 GB/s, NVIDIA/nccl-tests issue 212; 235 on A100s,
# the same file), for PCIe 4 × 16 what NCCL assumes. sockets: our shared memory's latency as measured within a socket,
# and a UPI or Infinity Fabric link, an assumption. ethernet: gloo over TCP, 25 Gb/s, an assumption. shared-memory and
# gloo: between ranks of this machine, where nothing is measured.
LINKS: Mapping[str, Link] = {
    "nvlink-4": Link(3.6e-6, 0.47e-6, 370e9, "NCCL's model of NVLink"),
    "nvlink-3": Link(3.6e-6, 0.47e-6, 235e9, "NCCL's model of NVLink"),
    "pcie-4": Link(3.6e-6, 1.0e-6, 24e9, "NCCL's model of PCIe"),
    "infiniband": Link(3.6e-6, 2.7e-6, 50e9, "NCCL's model of a network, at 400 Gb/s"),
    "ethernet": Link(200e-6, 50e-6, 3.1e9, "assumed: gloo over TCP, 25 Gb/s"),
    "sockets": Link(3e-6, 1e-6, 20e9, "assumed: shared memory across two sockets"),
    "shared-memory": Link(2e-6, 0.0, 4e9, "typical of shared memory"),
    "gloo": Link(400e-6, 0.0, 1e9, "typical of gloo on one machine"),
}
# Bytes/s between a device and its host (PCIe 4 x16), and of the host's memory, which all devices of a host share:
# assumptions, for what is offloaded.
HOST_LINK, HOST_MEMORY = 24e9, 150e9
# Share of the limit that a phase reaches, where its blocks were not measured. On a GPU: what good implementations
# report; on a CPU: the medians of benchmarks/results/plan.json.
REACHED = {
    "cuda": {"step": 0.45, "prompt": 0.6, "token": 0.7},
    "cpu": {"step": 0.69, "prompt": 0.83, "token": 0.69},
}

# Why a plan for this machine's processor is one process.
ONE_SOCKET = (
    "on one socket several ranks never beat one process: they share its cores and memory bandwidth, and add their "
    "exchanges"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, or the part of one that a rank has.

    kind: cpu or cuda. memory: bytes. link: to the other devices. measured: the limits were measured on this machine.
    parts: ranks that share the device evenly; memory and limits are those of one rank.
    """

    name: str
    kind: str
    memory: int
    limits: Limits
    link: Link
    measured: bool = False
    parts: int = 1

    def part(self, parts: int) -> "Device":
        """The part that each of `parts` ranks has."""
        limits = Limits(self.limits.bandwidth / parts, {dtype: r / parts for dtype, r in self.limits.rates.items()})
        return replace(self, memory=self.memory // parts, limits=limits, parts=parts)

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in a dtype. Raises ConfigError if it is not known."""
        rates = self.limits.rates
        found = rates.get(dtype) or rates.get("bfloat16" if dtype == "float16" else dtype)
        if not found:
            raise ConfigError(f"{self.name} has no known rate of {dtype} products; known: {', '.join(rates)}")
        return found


# name: (what it is, memory in GB, bytes/s of memory, bfloat16 and float32 FLOP/s, link). Data sheets, dense rates.
# CPUs: a socket's cores at their base clock, all memory channels filled; the Xeon multiplies bfloat16 in AMX tiles.
_SHEETS = {
    "h100": ("NVIDIA H100 SXM", 80, 3.35e12, 989e12, 67e12, "nvlink-4"),
    "h200": ("NVIDIA H200", 141, 4.8e12, 989e12, 67e12, "nvlink-4"),
    "a100-80gb": ("NVIDIA A100 80GB", 80, 2.039e12, 312e12, 19.5e12, "nvlink-3"),
    "l40s": ("NVIDIA L40S", 48, 0.864e12, 362e12, 91.6e12, "pcie-4"),
    "rtx4090": ("NVIDIA RTX 4090", 24, 1.008e12, 165e12, 82.6e12, "pcie-4"),
    "xeon": ("Xeon Platinum 8480+", 512, 307e9, 229e12, 7.2e12, "sockets"),
    "epyc": ("EPYC 9654", 768, 461e9, 14.7e12, 7.4e12, "sockets"),
}
DEVICES: Mapping[str, Device] = {
    key: Device(
        name=name,
        kind="cuda" if name.startswith("NVIDIA") else "cpu",
        memory=gigabytes * 10**9,
        limits=Limits(bandwidth, {"bfloat16": bfloat16, "float32": float32}),
        link=LINKS[link],
    )
    for key, (name, gigabytes, bandwidth, bfloat16, float32, link) in _SHEETS.items()
}


def known_device(name: str) -> Device:
    """Look up a device by name. Raises ConfigError, with the known names, for another one."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"device {name!r:.60} is not known; use auto (this machine) or one of {', '.join(DEVICES)}")
    return DEVICES[name.lower()]
