"""`fused_linear`: the norm before a product, the product, and the activation or residual after it, in few launches.

What a decoder block on CUDA is made of. The reference below computes the same with PyTorch's operations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops import triton_support
from hasten.ops.linear.beside import ACTIVATIONS, GATE_ROWS, NormArguments
from hasten.ops.linear.layouts import CHUNKS, Operands, Packed
from hasten.ops.linear.weights import BFLOAT16

__all__ = ["FusedLinear", "NormArguments", "fused_linear"]


class FusedLinear:
    """`fused_linear` of one weight with all but the rows fixed and checked: a call launches, and little else."""

    __slots__ = ("_on_triton", "activation", "dtype", "gated", "in_place", "norm", "outputs", "weight")

    def __init__(
        self,
        weight: Operands | Tensor,
        *,
        norm: NormArguments | None = None,
        activation: str | None = None,
        gated: bool = False,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        in_place: bool = False,
    ) -> None:
        if isinstance(weight, Tensor):
            weight = Operands(weight, None, None, None, bias, weight.shape[0], BFLOAT16)
        if out_dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"fused_linear computes in bfloat16 or float16; out_dtype is {out_dtype}")
        if activation is not None and activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; use {', '.join(ACTIVATIONS)} or None")
        if gated and weight.out_features % (2 * GATE_ROWS):
            raise ConfigError(f"a gated weight has a multiple of {2 * GATE_ROWS} rows; found {weight.out_features}")
        self.weight, self.activation, self.gated, self.dtype = weight, activation, gated, out_dtype
        self.norm = None if norm is None or norm.weight is None else norm
        self.in_place = in_place and self.norm is None and activation is None and not gated
        self.outputs = weight.out_features // 2 if gated else weight.out_features
        self._on_triton = triton_support.refusal(weight.data.device) is None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (R, K) and a residual as in `fused_linear`."""
        if residual is not None and residual.shape != (x.shape[0], self.outputs):
            raise ConfigError(
                f"the residual of this product is {(x.shape[0], self.outputs)}; found {tuple(residual.shape)}"
            )
        weight, norm = self.weight, self.norm
        if not self._on_triton:
            return reference(x, weight, norm, self.activation, self.gated, residual, self.dtype)
        from hasten.ops.linear.triton_linear import Beside, add_to_residual, fused_operator, product  # imports Triton

        if self.in_place and residual is not None:
            added = add_to_residual(residual, x, weight, self.dtype)
            if added is not None:
                return added
        kind = 0 if self.activation is None else ACTIVATIONS.index(self.activation) + 1
        if not triton_support.recorded():  # an operator's call takes the host longer than a launch
            return product(x, weight, Beside(self.dtype, norm, kind, self.gated, residual))
        form = weight.format.bits, weight.format.group_size, weight.planes
        parts = weight.data, weight.scales, weight.zeros, weight.bias, weight.out_features, *form
        norm = norm or NormArguments(None, None, 0.0)  # type: ignore[arg-type]
        return fused_operator(x, *parts, *norm, kind, self.gated, residual, self.dtype)


def fused_linear(
    x: Tensor,
    weight: Operands | Tensor,
    *,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> Tensor:
    """residual + act(norm(x)·Wᵀ + b) for x (R, K): float32 (R, N) with a residual, else in 16 bits.

    x: float32, bfloat16 or float16. weight: int8 or int4 as `PackedLinear.operands` of the kernel "triton" has it, or
    plain (N, K) in 16 bits with `bias` (N,). gated: 32 rows of a gate and 32 of an up take turns in the weight, and
    the outputs (R, N / 2) are act(gate) · up. residual: float32 (R, N). out_dtype: bfloat16 or float16, in which
    products of several rows take x, and of the result without a residual; x's own where that has 16 bits. in_place:
    the residual may be overwritten with the result and returned.

    The same bits for the same sizes; a row may get others in another number of rows.
    """
    made = FusedLinear(
        weight,
        norm=norm,
        activation=activation,
        gated=gated,
        bias=bias,
        out_dtype=out_dtype or x.dtype,
        in_place=in_place,
    )
    return made(x, residual)


def reference(
    x: Tensor,
    weight: Operands,
    norm: NormArguments | None,
    activation: str | None,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The same in float32, operation by operation."""
    y = x.float()
    if norm is not None:
        y = normed(y, norm)
    plain = weight.data.float()
    if weight.format.scales:
        packed = Packed(weight.data, weight.scales, weight.zeros, weight.outer)
        plain = CHUNKS.rows(packed, weight.format, (weight.out_features, x.shape[-1]), None).dequantize()
    y = F.linear(y, plain, None if weight.bias is None else weight.bias.float())
    if gated:
        gate, up = y.unflatten(-1, (-1, 2, GATE_ROWS)).unbind(-2)
        y = (activated(gate, activation) * up).flatten(-2)
    else:
        y = activated(y, activation)
    return y.to(dtype) if residual is None else residual + y


def normed(x: Tensor, norm: NormArguments) -> Tensor:
    """The norm of x in x's dtype."""
    weight = norm.weight.to(x.dtype) + norm.offset
    if norm.centred:
        return F.layer_norm(x, x.shape[-1:], weight, None if norm.bias is None else norm.bias.to(x.dtype), norm.eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight


def activated(x: Tensor, activation: str | None) -> Tensor:
    """The activation by name."""
    if activation == "silu":
        return F.silu(x)
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return x if activation is None else F.relu(x)
