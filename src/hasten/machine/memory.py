"""Memory of the machine and of this process: what is free, what is used, and the peak above a baseline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.machine.cgroup import read_cgroup_limits
from hasten.machine.files import system_file

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def total_memory() -> int:
    """Bytes of main memory this process could ever have: the machine's, or the control group's limit if smaller."""
    import psutil

    limit = read_cgroup_limits().memory_bytes
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def available_memory(device: str | torch.device = "cpu") -> int:
    """Bytes that can be allocated now on `device`.

    CPU: the system's estimate without swapping, cut by the control group's limit. CUDA: what the driver calls free and
    what torch's allocator holds unused.
    """
    if str(device) != "cpu":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = read_cgroup_limits().memory_available_bytes
    return available if limit is None else min(available, limit)


def process_memory(device: str | torch.device = "cpu") -> int:
    """Bytes that this process occupies now. CPU: resident set; mapped file pages count. CUDA: torch's tensors."""
    if str(device) != "cpu":
        import torch

        return torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory(device: str | torch.device = "cpu") -> int:
    """The most bytes this process ever had on `device` at once, since its start or the last reset_peak_memory().

    CPU: peak resident set. CUDA: peak of torch's allocated tensors.
    """
    if str(device) != "cpu":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    for line in (system_file(STATUS) or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def reset_peak_memory(device: str | torch.device = "cpu") -> bool:
    """Makes peak_memory() count from now; False where the system has no way to do that (the peak then stays)."""
    if str(device) != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set to the current one
        # Some sandboxes take the write and do nothing; 64 MiB is far above the kernel's counting error.
        return peak_memory() - process_memory() < 64 << 20
    except OSError:
        return False
