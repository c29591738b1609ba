"""The operator: its reference, its Triton kernel, and which of them serves."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops import triton_support
from hasten.ops.picker import Kernel, pick
from hasten.ops.residual.norm import Norm

WIDEST = 8192  # numbers of a row that a Triton program holds in registers


AddNorm = Callable[[Tensor, Tensor, Tensor | None, Norm, torch.dtype], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormRequest:
    """The request to a kernel. width: numbers in a row."""

    device: torch.device
    width: int


def reference(
    stream: Tensor, branch: Tensor, branch_bias: Tensor | None, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """stream + branch + bias (…, C) in the stream's dtype, and its norm, computed in float32 and rounded to `dtype`."""
    added = branch if branch_bias is None else branch.to(stream.dtype) + branch_bias
    total = stream + added
    return total, normalized(total, norm).to(dtype)


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """The norm of x (…, C), in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    weight = norm.weight.to(wide.dtype)
    if norm.centred:
        return F.layer_norm(
            wide, weight.shape, weight, None if norm.bias is None else norm.bias.to(wide.dtype), norm.eps
        )
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * (weight + norm.offset)


def _triton() -> AddNorm:
    from hasten.ops.residual.triton_add_norm import add_norm as run  # imports Triton

    return run


def _triton_unsupported(request: AddNormRequest) -> str | None:
    if request.width > WIDEST:
        return f"a row of {request.width} numbers does not fit a program; {WIDEST} do"
    return triton_support.refusal(request.device)


KERNELS: tuple[Kernel[AddNormRequest], ...] = (
    Kernel("triton", _triton, _triton_unsupported),
    Kernel("reference", lambda: reference, lambda request: None),
)


def bind(request: AddNormRequest, *, kernel: str | None = None) -> AddNorm:
    """The first kernel that serves, or the one named: for a model, which chooses once."""
    found: AddNorm = pick(KERNELS, request, forced=kernel).run()
    return found


def add_norm(
    stream: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    norm: Norm,
    *,
    dtype: torch.dtype,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """stream + (branch + branch_bias), float32 (…, C), and its norm in `dtype`, for the next product.

    Both results and all arguments are differentiable. `kernel` forces one by name.
    """
    request = AddNormRequest(device=stream.device, width=stream.shape[-1])
    return bind(request, kernel=kernel)(stream, branch, branch_bias, norm, dtype)
