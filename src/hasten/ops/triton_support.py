"""Whether Triton kernels can run on a device, without importing Triton."""

import importlib.util
import os
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

ASSUMED_CAPABILITY = (9, 0)  # Hopper, where a GPU is asked about that is not here
LEAST_CAPABILITY = (8, 0)  # Ampere: the first whose tensor cores take bfloat16


_CAPABILITIES: dict[Any, tuple[int, int]] = {}  # by who was asked, and the device


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, or Hopper's if there is no device."""
    key = torch.cuda.is_available, torch.cuda.get_device_capability, device.index
    kept = device.index is not None and not torch.compiler.is_compiling()
    if kept and key in _CAPABILITIES:
        return _CAPABILITIES[key]
    found = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else ASSUMED_CAPABILITY
    if kept:
        _CAPABILITIES[key] = found
    return found


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(device: torch.device, capability: Callable[[], tuple[int, int]] | None = None) -> str | None:
    """Why no Triton kernel runs on this device, or None. Triton's interpreter (TRITON_INTERPRET=1) runs on a CPU.

    capability: the compute capability, if the device is not present.
    """
    if device.type != ("cpu" if interpreted() else "cuda"):
        where = "a CPU (TRITON_INTERPRET=1 is set)" if interpreted() else "a CUDA GPU"
        return f"it needs {where}; the layer is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return None
    found = compute_capability(device) if capability is None else capability()
    if found < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device) if capability is None else str(device)
        return f"it needs compute capability 8.0 or later, {name} has {'.'.join(map(str, found))}"
    return None


def failed(error: BaseException) -> bool:
    """Whether Triton could not compile or launch a kernel (a RuntimeError where the GPU has no room for all programs of
    a cooperative launch), or lacks what the kernel's file imports. Its errors have no class of their own in common.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    lacking = error.name if isinstance(error, ImportError) else None
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        lacking = error.obj.__name__
    frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any((name or "").partition(".")[0] == "triton" for name in (lacking, *frames))


def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start there while the one before it ends (programmatic dependent launch: Hopper)."""
    return device.type == "cuda" and compute_capability(device) >= (9, 0)


def early_start(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """Options of a launch that may start while the kernel before it ends."""
    early = wanted and starts_early(device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def recorded() -> bool:
    """Whether calls are compiled or seen by a dispatch mode, which want operators of PyTorch's."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


class Operator:
    """A function that is called as an operator of PyTorch's where calls are recorded, and directly everywhere else.

    A call through PyTorch's dispatcher takes the host longer than the launch of a kernel. There are no gradients.
    """

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: Iterable[str]) -> None:
        self.function = function
        self.dispatched = torch.library.custom_op(name, function, mutates_args=mutates_args)
        self.register_fake = self.dispatched.register_fake

    def __call__(self, *args: Any) -> Any:
        return (self.dispatched if recorded() else self.function)(*args)


def registered(name: str, *, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Make an `Operator` of a function."""
    return lambda function: Operator(name, function, mutates_args)


def readable(x: Tensor) -> Tensor:
    """x, in float32 where Triton's interpreter would take bfloat16's bits for integers."""
    return x.float() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x
