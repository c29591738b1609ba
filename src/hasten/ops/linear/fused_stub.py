"""A stand-in for the fused products on a GPU: the same interface in plain PyTorch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.linear.layouts import Operands

GATE_ROWS = 32


class NormArguments(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float
    centred: bool


def fused_linear(
    x: Tensor,
    weight: Operands | Tensor,
    *,
    bias: Tensor | None = None,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = out_dtype or x.dtype
    if norm is not None:
        x = x.float()
        if norm.centred:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight.float() + norm.offset)
        if norm.bias is not None:
            x = x + norm.bias.float()
    if isinstance(weight, Tensor):
        y = F.linear(x.float().to(dtype).float(), weight.float(), None if bias is None else bias.float())
    else:
        from hasten.ops.linear.triton_linear import linear

        y = linear(x.to(dtype), weight).float()
    if gated:
        gate, up = y.unflatten(-1, (-1, 2, GATE_ROWS)).unbind(-2)
        gate, up = gate.flatten(-2), up.flatten(-2)
    else:
        gate, up = y, None
    match activation:
        case "silu":
            gate = F.silu(gate)
        case "gelu":
            gate = F.gelu(gate)
        case "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
        case "relu":
            gate = F.relu(gate)
    y = gate if up is None else gate * up
    return y.to(dtype) if residual is None else residual + y
