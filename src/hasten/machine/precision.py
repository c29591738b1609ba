"""Decides in which dtype this machine multiplies fast, for training, loading and the ladders.

A processor without instructions for bfloat16 or float16 emulates their products, at a hundredth to a third of
float32's rate. So training there computes in float32, and what readable layers hold in 16 bits is multiplied in
float32. The rule is the list of the processor's instruction sets, as torch's matrix library (oneDNN) will use them;
measured times overrule it (`hasten.machine.measured`). Reading 16-bit weights is as cheap everywhere, so stored
weights keep their dtype.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hasten.machine.measure import product
from hasten.machine.measured import compare, slower
from hasten.machine.processor import instruction_sets

if TYPE_CHECKING:
    import torch

# The instruction sets with products of a dtype. Of Arm's, "bf16" and "asimdhp" (float16).
NATIVE = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
# Values of ONEDNN_MAX_CPU_ISA that leave them out. (ATEN_CPU_CAPABILITY does not: torch's products stay oneDNN's; and
# HASTEN_ISA is about our kernels only.)
_WITHOUT = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni")
LIMITED = {"bfloat16": _WITHOUT, "float16": (*_WITHOUT, "avx512_core_bf16")}
SHAPE = (64, 1024, 1024)  # rows, outputs, inputs of the product that is measured


@dataclass(frozen=True, slots=True)
class ProductPrecision:
    """The dtype of matrix products, and the reason."""

    dtype: str
    reason: str

    def __str__(self) -> str:
        return f"{self.dtype}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """The fields as plain JSON values."""
        return asdict(self)


def training_precision(device: str | torch.device = "cpu") -> ProductPrecision:
    """The dtype of `auto` in training: bfloat16 if the device multiplies it fast, else float32."""
    reason = emulated("bfloat16", device)
    if reason is not None:
        return ProductPrecision("float32", reason)
    return ProductPrecision("bfloat16", f"this {_kind(device)} multiplies it at full speed")


def emulated(dtype: str | torch.dtype, device: str | torch.device = "cpu") -> str | None:
    """Why products in `dtype` are slower on the device than in float32, or None where they are not."""
    name = str(dtype).removeprefix("torch.")
    if name not in NATIVE or str(device).partition(":")[0] not in ("cpu", "cuda"):
        return None
    if _kind(device) == "GPU":
        return _on_cuda(name, device)
    rule = _by_instructions(name, _flags(), os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA")))
    times = compare(f"products of {' × '.join(map(str, SHAPE))} in {name}", lambda: _products(name))
    if rule is not None:
        return rule if slower("float32", name, times) is None else None
    return slower(name, "float32", times)


def _kind(device: str | torch.device) -> str:
    return "GPU" if str(device).startswith("cuda") else "processor"


def _on_cuda(name: str, device: str | torch.device) -> str | None:
    import torch

    if name == "float16" or not torch.cuda.is_available():  # asked about a GPU that is elsewhere
        return None
    with torch.cuda.device(device):
        fine = torch.cuda.is_bf16_supported(including_emulation=False)
    return None if fine else f"{name} is emulated by this GPU"


def _by_instructions(name: str, flags: tuple[str, ...], limit: str | None) -> str | None:
    if not set(flags) & set(NATIVE[name]):
        return f"{name} is emulated by this processor"
    if limit is not None and limit.lower() in LIMITED[name]:
        return f"{name} is emulated: ONEDNN_MAX_CPU_ISA is {limit}"
    return None


@functools.cache
def _flags() -> tuple[str, ...]:
    return instruction_sets()


def _products(name: str) -> dict[str, Callable[[], object]]:
    import torch

    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        return {dtype: product(dtype, *SHAPE, "cpu") for dtype in ("float32", name)}
