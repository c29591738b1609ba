"""Whether Triton's kernels can run on a device: asked without importing Triton."""

import importlib.util
import os

import torch

LEAST_CAPABILITY = (8, 0)  # Ampere: the first whose tensor cores take bfloat16


def refusal(device: torch.device) -> str | None:
    """Why no Triton kernel runs on this device, or None. Triton's interpreter (TRITON_INTERPRET=1) runs on a CPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != ("cpu" if interpreted else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if interpreted else "CUDA"
        return f"it runs on {where}, the layer is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not interpreted and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"it needs compute capability 8.0 or later, {torch.cuda.get_device_name(device)} has {found}"
    return None
