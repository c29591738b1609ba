"""The native activation functions of activation.cpp, with their gradients."""

import functools
import os
import threading
from typing import Any

import torch
from torch import Tensor

from hasten.errors import ResourceError
from hasten.ops.build import namespace
from hasten.ops.native import choose_isa, library

DTYPES = (torch.float32, torch.bfloat16)

_registering = threading.Lock()


def bias_gelu(z: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(z + bias), tanh form, of z (..., W) and bias (W,) or None; float32 or bfloat16, on the CPU."""
    out: Tensor = getattr(torch.ops, ready(None)).bias_gelu.default(z, bias)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both (..., W), float32 or bfloat16, on the CPU."""
    out: Tensor = getattr(torch.ops, ready(None)).silu_mul.default(gate, up)
    return out


def ready(isa: str | None) -> str:
    """The namespace of one instruction set's operators, with their gradients known to torch."""
    with _registering:  # torch takes a gradient once
        return _registered(isa or os.environ.get("HASTEN_ISA"))


# A graph holds its result. This is torch.compiler.assume_constant_result without importing the compiler for it.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _registered(asked: str | None) -> str:
    return _with_gradients(choose_isa(asked))


@functools.cache
def _with_gradients(isa: str) -> str:
    native = library(isa)
    if native is None:
        raise ResourceError("there are no native kernels here; a C++ compiler is needed, and HASTEN_ISA must allow one")
    gelu_backward, silu_backward = native.ops.bias_gelu_backward.default, native.ops.silu_mul_backward.default

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward_of_gelu(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        z, bias = ctx.saved_tensors
        dz, dbias = gelu_backward(dout, z, bias)
        return dz, None if bias is None else dbias.to(bias.dtype)

    def backward_of_silu(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(silu_backward(dout, *ctx.saved_tensors))

    space = namespace(isa)
    torch.library.register_autograd(f"{space}::bias_gelu", backward_of_gelu, setup_context=remember)
    torch.library.register_autograd(f"{space}::silu_mul", backward_of_silu, setup_context=remember)
    return space
