"""The loss operator: its kernels in order of preference, and the public function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops import triton_support
from hasten.ops.loss.chunked import chunked, chunked_triton
from hasten.ops.loss.kernels import IGNORED, Head, reference, torch_loss
from hasten.ops.picker import Kernel, pick

__all__ = ["IGNORED", "KERNELS", "LossRequest", "linear_cross_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRequest:
    """The request to a kernel. dtype: that of the matrix products."""

    device: torch.device
    dtype: torch.dtype
    softcap: float | None = None


def _torch_unsupported(request: LossRequest) -> str | None:
    if not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy; it came with 2.13"
    if request.softcap is not None:
        return "PyTorch's has no soft-capping of logits"
    if request.device.type == "cpu" and request.dtype != torch.float32:
        return "on a CPU PyTorch's multiplies the weight's gradient in float32, whatever the dtype"
    return None


def _triton_unsupported(request: LossRequest) -> str | None:
    if request.softcap is not None:
        return "it has no soft-capping of logits"
    if request.dtype == torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    return triton_support.refusal(request.device)


KERNELS: tuple[Kernel[LossRequest], ...] = (
    Kernel("chunked-triton", chunked_triton, _triton_unsupported),
    Kernel("torch", torch_loss, _torch_unsupported),
    Kernel("chunked", chunked, lambda request: None),
    Kernel("reference", reference, lambda request: None),
)


def choose_loss(
    device: torch.device, dtype: torch.dtype, *, softcap: float | None = None, kernel: str | None = None
) -> Kernel[LossRequest]:
    """Pick the kernel for products in `dtype`, for a caller that computes many losses; `kernel` forces one by name."""
    return pick(KERNELS, LossRequest(device=device, dtype=dtype, softcap=softcap), forced=kernel)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    kernel: str | Kernel[LossRequest] | None = None,
) -> Tensor:
    """The sum over all tokens of -log softmax(x·weightᵀ + bias)[target], in nats; float32 scalar.

    x (..., C), targets int64 (...), -100 where nothing is to be predicted. weight (rows, C): the head, of whose rows
    the first `vocab_size` are tokens (None: all) and the others padding that gets no probability and no gradient.
    softcap: logits become softcap·tanh(logits / softcap). Under autocast the products are in its dtype, else in x's.
    kernel: a name to force, or the result of `choose_loss`. Raises ConfigError for shapes, dtypes and devices that do
    not fit, and on a CPU for targets that are no tokens. On CUDA targets are not looked at, which would make every step
    wait for the device: one that is no token makes the loss infinite there (`chunked-triton`), or may stop CUDA.
    """
    if targets.shape != x.shape[:-1] or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ConfigError(
            f"linear_cross_entropy wants x (..., C), weight (rows, C) and targets of x's leading shape; found "
            f"{tuple(x.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    size = weight.shape[0] if vocab_size is None else vocab_size
    if not 0 < size <= weight.shape[0]:
        raise ConfigError(f"vocab_size is {size} and the weight has {weight.shape[0]} rows; it must be from 1 to that")
    if targets.dtype != torch.int64 or not x.is_floating_point():
        raise ConfigError(f"x must be floating and targets int64; found {x.dtype} and {targets.dtype}")
    if not x.device == weight.device == targets.device:
        raise ConfigError(
            f"x, weight and targets must be on one device; found {x.device}, {weight.device} and {targets.device}"
        )
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = ((targets < 0) & (targets != IGNORED)) | (targets >= size)
        if wrong.any():
            raise ConfigError(
                f"targets must be tokens from 0 to {size - 1}, or {IGNORED} where nothing is to be predicted; found "
                f"{int(targets[wrong][0])}"
            )
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    chosen = kernel if isinstance(kernel, Kernel) else choose_loss(x.device, dtype, softcap=softcap, kernel=kernel)
    run: Callable[..., Tensor] = chosen.run
    if not chosen.name.startswith("chunked"):  # which rounds a chunk's products only
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return run(x.flatten(0, -2).to(dtype), targets.flatten(), Head(weight, size, bias, softcap))
