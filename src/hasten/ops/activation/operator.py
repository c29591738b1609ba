"""The activation operators: references, native kernels, and the choice between them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.native import NativeLibrary, missing_library, slower_than_pytorch, with_gradients
from hasten.ops.picker import Kernel, pick

DTYPES = (torch.float32, torch.bfloat16)  # of the native kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRequest:
    """The properties of a call by which a kernel is chosen."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Functions:
    """One implementation of both functions."""

    bias_gelu: Callable[[Tensor, Tensor | None], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]


def reference_bias_gelu(z: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(z + bias) in its tanh form (arXiv 1606.08415), computed in float32 and rounded once."""
    wide = z if z.dtype == torch.float64 else z.float()
    return F.gelu(wide if bias is None else wide + bias.to(wide.dtype), approximate="tanh").to(z.dtype)


def reference_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202), computed in float32 and rounded once."""
    wide = gate if gate.dtype == torch.float64 else gate.float()
    return (F.silu(wide) * up.to(wide.dtype)).to(gate.dtype)


def native() -> Functions:
    """The native operators, float32 or bfloat16, on the CPU. Looked up once: a layer calls them in every step."""
    ops = getattr(torch.ops, _ready(None))
    return Functions(ops.bias_gelu.default, ops.silu_mul.default)


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


_ready = with_gradients(_register)  # the namespace of one instruction set's operators


def _native_unsupported(request: ActivationRequest) -> str | None:
    if request.device.type != "cpu":
        return f"it needs a CPU; the tensors are on {request.device}"
    if request.dtype not in DTYPES:
        return f"it takes float32 and bfloat16, not {str(request.dtype).removeprefix('torch.')}"
    return missing_library("training")


def _native_opt_in(request: ActivationRequest) -> str | None:
    """Why PyTorch's functions are faster on this processor, by timing a small layer, or None."""
    what = f"silu_mul of 256 × 1024 {str(request.dtype).removeprefix('torch.')}, and its gradients"
    return slower_than_pytorch(what, lambda: _contenders(request.dtype), "training")


def _contenders(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    values = torch.randn(3, 256, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = (x.requires_grad_() for x in values[:2])

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(gate, up), (gate, up), values[2])

    return {"native": run(native().silu_mul), "PyTorch's": run(lambda gate, up: F.silu(gate) * up)}


def bind(request: ActivationRequest, *, kernel: str | None = None) -> Functions:
    """Both functions of the first kernel that fits, or of the one named; a layer calls this once."""
    found: Functions = pick(KERNELS, request, forced=kernel).run()
    return found


KERNELS: tuple[Kernel[ActivationRequest], ...] = (
    Kernel("native", native, _native_unsupported, _native_opt_in),
    Kernel("reference", lambda: Functions(reference_bias_gelu, reference_silu_mul), lambda request: None),
)


def bias_gelu(z: Tensor, bias: Tensor | None = None, *, kernel: str | None = None) -> Tensor:
    """gelu(z + bias), the tanh form: z (..., W), bias (W,). Its backward pass gives the bias's gradient on the way.

    `kernel` forces one by name. Raises ConfigError for shapes that do not fit, and for a kernel that cannot serve.
    """
    if bias is not None and (bias.dim() != 1 or not z.dim() or bias.shape[0] != z.shape[-1]):
        raise ConfigError(f"bias_gelu wants z (..., W) and bias (W,); found {tuple(z.shape)} and {tuple(bias.shape)}")
    if bias is not None and bias.device != z.device:
        raise ConfigError(f"bias_gelu wants z and bias on one device; found {z.device} and {bias.device}")
    return _functions(z, kernel).bias_gelu(z, bias)


def silu_mul(gate: Tensor, up: Tensor, *, kernel: str | None = None) -> Tensor:
    """silu(gate) · up, of one shape (..., W) and dtype.

    `kernel` forces one by name. Raises ConfigError for shapes that do not fit, and for a kernel that cannot serve.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ConfigError(
            f"silu_mul wants two tensors of one shape and dtype; found {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}"
        )
    if gate.device != up.device:
        raise ConfigError(f"silu_mul wants two tensors on one device; found {gate.device} and {up.device}")
    return _functions(gate, kernel).silu_mul(gate, up)


def _functions(like: Tensor, kernel: str | None) -> Functions:
    return bind(ActivationRequest(device=like.device, dtype=like.dtype), kernel=kernel)
