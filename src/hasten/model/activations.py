"""The activation functions of MLPs, by the names of `ModelConfig.activation`."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gelu_tanh(x: Tensor) -> Tensor:
    """x·Φ(x) with GPT-2's approximation of Φ by a hyperbolic tangent (arXiv 1606.08415).

    When compiled for a CPU it uses the logistic function, (1 + tanh u)/2 = 1/(1 + e^-2u): the compiler's exponential
    takes a third of the time of its tanh.
    """
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        wide = x.float()
        return (wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² (arXiv 2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x·σ(1.702·x), which approximates x·Φ(x) (arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


class XIELU(nn.Module):
    """xIELU (arXiv 2411.13010): αp·x² + β·x for positive x, else αn·(e^min(x, ε) - 1 - x) + β·x, in float32.

    Learned are alpha_p and alpha_n, (1,) each: αp = softplus(alpha_p), αn = β + softplus(alpha_n). The files of a model
    hold β and ε too, which are the same in all.
    """

    BETA, EPS = 0.5, -1e-6
    INITIAL: ClassVar = {"alpha_p": 0.8, "alpha_n": 0.8 - BETA}  # after the softplus

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def factors(self) -> tuple[Tensor, Tensor]:
        """αp and αn, float32 (1,)."""
        return F.softplus(self.alpha_p.float()), self.BETA + F.softplus(self.alpha_n.float())

    def forward(self, x: Tensor) -> Tensor:
        wide, (positive, negative) = x.float(), self.factors()
        below = (wide.clamp(max=self.EPS).expm1() - wide) * negative
        return (torch.where(wide > 0, positive * wide * wide, below) + self.BETA * wide).to(x.dtype)


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of an MLP by its name: a function, or a module where it has parameters."""
    return XIELU() if name == "xielu" else ACTIVATIONS[name]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
}
