"""Devices to plan for that are not at hand: what their data sheets say, and what of it is commonly reached."""

from collections.abc import Mapping
from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.machine.limits import Limits

LATENCY = 10e-6  # seconds of one exchange between devices
# Of a limit, what a phase reaches where nothing was measured: what good implementations report.
REACHED = {"step": 0.45, "prompt": 0.6, "token": 0.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """kind: cpu or cuda. memory: bytes. link: bytes/s to the next device. measured: the limits are this machine's."""

    name: str
    kind: str
    memory: int
    limits: Limits
    link: float
    measured: bool = False

    def rate(self, dtype: str) -> float:
        """FLOP/s in products of a dtype. Raises ConfigError where it is not known."""
        rates = self.limits.rates
        found = rates.get(dtype) or rates.get("bfloat16" if dtype == "float16" else dtype)
        if not found:
            raise ConfigError(f"{self.name} has no known rate of {dtype} products; known: {', '.join(rates)}")
        return found


# name: (what it is, memory in GB, bytes/s of memory, bfloat16 and float32 FLOP/s, link in bytes/s). Data sheets: dense
# rates, one direction of NVLink or PCIe. CPUs: all cores of one socket at their base clock, all memory channels filled;
# the Xeon multiplies bfloat16 in AMX tiles.
_SHEETS = {
    "h100": ("NVIDIA H100 SXM", 80, 3.35e12, 989e12, 67e12, 450e9),
    "h200": ("NVIDIA H200", 141, 4.8e12, 989e12, 67e12, 450e9),
    "a100-80gb": ("NVIDIA A100 80GB", 80, 2.039e12, 312e12, 19.5e12, 300e9),
    "l40s": ("NVIDIA L40S", 48, 0.864e12, 362e12, 91.6e12, 32e9),
    "rtx4090": ("NVIDIA RTX 4090", 24, 1.008e12, 165e12, 82.6e12, 32e9),
    "xeon": ("Xeon Platinum 8480+", 512, 307e9, 229e12, 7.2e12, 20e9),
    "epyc": ("EPYC 9654", 768, 461e9, 14.7e12, 7.4e12, 20e9),
}
DEVICES: Mapping[str, Device] = {
    key: Device(
        name=name,
        kind="cuda" if name.startswith("NVIDIA") else "cpu",
        memory=gigabytes * 10**9,
        limits=Limits(bandwidth, {"bfloat16": bfloat16, "float32": float32}),
        link=link,
    )
    for key, (name, gigabytes, bandwidth, bfloat16, float32, link) in _SHEETS.items()
}


def known_device(name: str) -> Device:
    """A row of the table. Raises ConfigError, with the rows, for another name."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"device {name!r:.60} is not known; use auto (this machine) or one of {', '.join(DEVICES)}")
    return DEVICES[name.lower()]
