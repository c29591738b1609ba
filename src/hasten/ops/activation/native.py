"""The native activation functions of activation.cpp, with their gradients."""

from typing import Any

import torch
from torch import Tensor

from hasten.ops.gradients import with_gradients
from hasten.ops.native import NativeLibrary

DTYPES = (torch.float32, torch.bfloat16)


def bias_gelu(z: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(z + bias), tanh form, of z (..., W) and bias (W,) or None; float32 or bfloat16, on the CPU."""
    out: Tensor = getattr(torch.ops, ready(None)).bias_gelu.default(z, bias)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both (..., W), float32 or bfloat16, on the CPU."""
    out: Tensor = getattr(torch.ops, ready(None)).silu_mul.default(gate, up)
    return out


def _register(native: NativeLibrary, space: str) -> None:
    gelu_backward, silu_backward = native.ops.bias_gelu_backward.default, native.ops.silu_mul_backward.default

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward_of_gelu(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        z, bias = ctx.saved_tensors
        dz, dbias = gelu_backward(dout, z, bias)
        return dz, None if bias is None else dbias.to(bias.dtype)

    def backward_of_silu(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(silu_backward(dout, *ctx.saved_tensors))

    torch.library.register_autograd(f"{space}::bias_gelu", backward_of_gelu, setup_context=remember)
    torch.library.register_autograd(f"{space}::silu_mul", backward_of_silu, setup_context=remember)


ready = with_gradients(_register)  # the namespace of one instruction set's operators
