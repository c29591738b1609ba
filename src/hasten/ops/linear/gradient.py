"""The gradient of the input of a frozen weight, dx = dy·W, with a piece of W as floats at a time.

Autograd would keep, from the forward pass to the backward one, whatever the product made of each layer's weight: all of
a quantized model as floats. Nothing is kept here but the weight as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PIECE = 4 << 20  # bytes of W as floats at a time

SomeRows = Callable[[int, int, torch.dtype], Tensor]  # the rows of W (N, K) from one to another, as floats


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Callable[[Tensor], Tensor], rows: SomeRows) -> Tensor:
        ctx.rows, ctx.size, ctx.dtype = rows, x.shape[-1], x.dtype
        return product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return input_gradient(gradients[0], ctx.rows, ctx.size).to(ctx.dtype), None, None


_apply: Callable[..., Tensor] = _FrozenProduct.apply


def frozen_product(x: Tensor, product: Callable[[Tensor], Tensor], rows: SomeRows) -> Tensor:
    """`product(x)`, x·Wᵀ for x (…, K), whose gradient is `input_gradient`'s; W has none."""
    return _apply(x, product, rows)


def outside_graphs() -> None:
    """To be called before torch.compile: graphs end at these products, which are kernels, and closures of them.

    Not when this is imported, because torch.compiler.disable imports the compiler.
    """
    global _apply
    _apply = torch.compiler.disable(_FrozenProduct.apply)


def input_gradient(dy: Tensor, rows: SomeRows, in_features: int) -> Tensor:
    """dy·W (…, K) for dy (…, N), in dy's dtype."""
    flat = dy.flatten(0, -2)  # (M, N)
    dx = flat.new_zeros(len(flat), in_features, dtype=torch.promote_types(dy.dtype, torch.float32))
    step = max(1, PIECE // (4 * 64 * in_features)) * 64  # whole panels
    for start in range(0, flat.shape[1], step):
        stop = min(start + step, flat.shape[1])
        dx += flat[:, start:stop] @ rows(start, stop, dy.dtype)
    return dx.to(dy.dtype).view(*dy.shape[:-1], in_features)
