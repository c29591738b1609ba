"""Whether Triton's kernels can run on a device: asked without importing Triton."""

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

ASSUMED_CAPABILITY = (9, 0)  # Hopper, where a GPU is asked about that is not here
LEAST_CAPABILITY = (8, 0)  # Ampere: the first whose tensor cores take bfloat16


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device, or Hopper's where there is no device to ask."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else ASSUMED_CAPABILITY


def refusal(device: torch.device, capability: Callable[[], tuple[int, int]] | None = None) -> str | None:
    """Why no Triton kernel runs on this device, or None. Triton's interpreter (TRITON_INTERPRET=1) runs on a CPU.

    capability: says the compute capability where the device itself may not be here to ask.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != ("cpu" if interpreted else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if interpreted else "CUDA"
        return f"it runs on {where}, the layer is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted:
        return None
    found = compute_capability(device) if capability is None else capability()
    if found < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device) if capability is None else str(device)
        return f"it needs compute capability 8.0 or later, {name} has {'.'.join(map(str, found))}"
    return None


def launches_early() -> bool:
    """Whether the kernels of a fused block are launched while the one before them ends (programmatic dependent launch).

    Each then waits before it reads what the other wrote. HASTEN_EARLY_LAUNCH=1 switches it on, on Hopper GPUs.
    """
    return os.environ.get("HASTEN_EARLY_LAUNCH") == "1" and os.environ.get("TRITON_INTERPRET") != "1"


def early_launch() -> dict[str, bool]:
    """The same as options of a launch, whose kernel has a constant PDL."""
    return {"PDL": True, "launch_pdl": True} if launches_early() else {"PDL": False}


def readable(x: Tensor) -> Tensor:
    """x, in float32 where Triton's interpreter would take bfloat16's bits for integers."""
    return x.float() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x
