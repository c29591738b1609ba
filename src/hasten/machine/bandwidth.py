"""The memory bandwidth of a device as far as it is known, without measuring it now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.machine.limits import vendor_limits
from hasten.machine.measured import keep, kept

if TYPE_CHECKING:
    import torch

_READ = 1e9  # bytes whose time is stored


def keep_bandwidth(bandwidth: float) -> None:
    """Store what was measured of this machine's memory, in bytes/s, with the present number of threads."""
    keep(_what(), {"read": _READ / bandwidth})


def known_bandwidth(device: torch.device) -> float | None:
    """Bytes/s: of a CPU what `hasten doctor` measured last with as many threads, of a GPU what its data sheet says."""
    import torch

    if device.type == "cpu":
        seconds = kept(_what()).get("read")
        return None if seconds is None else _READ / seconds
    limits = vendor_limits(torch.cuda.get_device_name(device))
    return None if limits is None else limits.bandwidth


def _what() -> str:
    import torch

    return f"reading 1 GB of memory, {torch.get_num_threads()} threads"
