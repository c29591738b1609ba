"""The experts operator: of each row the MLPs that it takes, act(x·Gateᵀ)·(x·Upᵀ)·Downᵀ, added up by its shares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops import triton_support
from hasten.ops.experts.weights import ExpertWeights
from hasten.ops.linear import operator as linear_operator
from hasten.ops.linear.beside import ACTIVATIONS
from hasten.ops.linear.fused import activated
from hasten.ops.linear.layouts import CHUNKS, Operands, Packed
from hasten.ops.linear.operator import TRITON_DTYPES, LinearRequest
from hasten.ops.picker import Kernel

FEATURES = 8  # that a thread reads at once, 16 bytes

# rows (R, C), their shares float32 (R, k) and the numbers of the experts that they take, int64 (R, k) -> (R, C)
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRequest:
    """The request of a layer's experts to a kernel.

    inner: that of gate and up; down: that of the product behind them. unusual: what the experts have that no kernel
    computes, as a reason, or None.
    """

    inner: LinearRequest
    down: LinearRequest
    activation: str
    unusual: str | None = None


def reference(rows: Tensor, shares: Tensor, chosen: Tensor, weights: ExpertWeights) -> Tensor:
    """Compute one expert after the other in float32; returns the rows' dtype."""
    out = torch.zeros_like(rows, dtype=torch.float32)
    for number, (gate, up, down) in enumerate(zip(weights.gate, weights.up, weights.down, strict=True)):
        row, slot = torch.where(chosen == number)
        x = rows[row].float()  # (P, C)
        inner = activated(F.linear(x, plain(gate, x)), weights.activation) * F.linear(x, plain(up, x))  # (P, I)
        out.index_add_(0, row, F.linear(inner, plain(down, inner)) * shares[row, slot, None])
    return out.to(rows.dtype)


def plain(weight: Operands, x: Tensor) -> Tensor:
    """A weight (N, K) in float32; x (…, K) is what it is multiplied with."""
    if not weight.format.scales:
        return weight.data.float()
    packed = Packed(weight.data, weight.scales, weight.zeros, weight.outer)
    return CHUNKS.rows(packed, weight.format, (weight.out_features, x.shape[-1]), None).dequantize()


def _triton_unsupported(request: ExpertsRequest) -> str | None:
    device, dtype = request.inner.device, str(request.inner.dtype).removeprefix("torch.")
    if device.type == "cpu" and (reason := triton_support.refusal(device)) is not None:
        return reason
    if request.inner.dtype not in TRITON_DTYPES:
        return f"it takes bfloat16 and float16 activations, not {dtype}"
    if request.activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, not {request.activation}"
    product = next(kernel for kernel in linear_operator.KERNELS if kernel.name == "triton")
    for one in (request.inner, request.down):
        if not one.format.scales and one.format.element != dtype:
            return f"its experts hold {one.format.element} weights, and their activations are {dtype}"
        if one.format.scales and (reason := product.unsupported_reason(one)) is not None:
            return reason
        if one.in_features % FEATURES:
            return f"it reads {FEATURES} features at once, and {one.in_features} are no multiple of that"
    return request.unusual or triton_support.refusal(device)


def _triton(weights: ExpertWeights) -> Grouped:
    # Imported here, because it imports Triton: only where the kernel is taken.
    from hasten.ops.experts.triton_experts import TritonExperts

    return TritonExperts(weights)


# `run` takes the weights, once, when a layer is bound. In the place of "readable" a layer calls its own modules, which
# may be of any kind (`Experts.one_by_one`).
KERNELS: tuple[Kernel[ExpertsRequest], ...] = (
    Kernel("triton", _triton, _triton_unsupported),
    Kernel("readable", lambda weights: partial(reference, weights=weights), lambda request: None),
)
