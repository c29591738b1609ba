"""Products of 16-bit weights in float32, where the processor only emulates 16-bit ones: `WideLinear`, `WideEmbedding`.

`in_pieces` is also how PyTorch multiplies by quantized weights on a CPU (operator.py).

The weights keep their dtype and their place; nothing else of them is ever in memory than a piece that stays in the
caches. Activations are float32 from the embedding on.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.ops.linear.gradient import frozen_product

PIECE = 4 << 20  # bytes of a weight as floats at a time; a whole one would be written to memory and read again


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x·Wᵀ + b in x's dtype for x (…, K) and a weight (N, K) of a shorter one, int8 too.

    A single row with a bfloat16 weight goes through PyTorch's product of a matrix and a vector, which widens the weight
    in registers, and rounds x and y to bfloat16: it reads 2 bytes a weight; a piece is read, written and read again.
    """
    if x.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.to(x.dtype)
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if learns and not weight.requires_grad and not torch.compiler.is_compiling():  # a compiled graph converts it again
        product = partial(wide_linear, weight=weight, bias=bias)
        return frozen_product(x, product, lambda start, stop, dtype: weight[start:stop].to(dtype))
    if x.device.type != "cpu" or learns or torch.compiler.is_compiling():
        return F.linear(x, weight.to(x.dtype), wide)
    n, k = weight.shape
    if x.numel() == k and weight.dtype == torch.bfloat16:  # float16 could not hold every x
        narrow = None if bias is None else bias.to(weight.dtype)
        return F.linear(x.to(weight.dtype), weight, narrow).to(x.dtype)
    return in_pieces(x, n, lambda rows: weight[rows].to(x.dtype), wide)


def in_pieces(x: Tensor, out_features: int, rows: Callable[[slice], Tensor], bias: Tensor | None) -> Tensor:
    """y = x·Wᵀ + b for x (…, K), with some rows of W at a time, which `rows` gives in x's dtype, as `bias` is."""
    step = max(1, PIECE // (x.shape[-1] * x.element_size()))
    if out_features <= step:
        return F.linear(x, rows(slice(None)), bias)
    y = x.new_empty(*x.shape[:-1], out_features)
    for start in range(0, out_features, step):
        own = slice(start, start + step)
        y[..., own] = F.linear(x, rows(own), None if bias is None else bias[own])
    return y


class WideLinear(nn.Linear):
    """nn.Linear that multiplies in the dtype of its activations, whatever the weight's is."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in) -> (…, out) in x's dtype."""
        return wide_linear(x, self.weight, self.bias)


class WideEmbedding(nn.Embedding):
    """nn.Embedding whose rows come out in float32."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (…) -> (…, C)."""
        return super().forward(tokens).float()
