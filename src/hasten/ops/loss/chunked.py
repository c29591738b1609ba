"""Cross-entropy over chunks of rows: the logits of a few hundred rows are in memory, never those of all.

The gradient of a row's loss by its logits is softmax - one-hot: known as soon as the logits are, up to the factor that
the backward pass brings. So the forward pass makes a chunk's logits, turns them into that gradient in place, multiplies
it with the head's weight (the gradient by x) and with x (its share of the gradient by the weight), and forgets it; the
backward pass is two multiplications by a scalar. The same three matrix products as the plain way, and nothing of size
rows x vocabulary. The idea is that of Liger (arXiv 2410.10989) and of PyTorch's own chunked loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hasten.ops.loss.compiled import compiled_loss
from hasten.ops.loss.kernels import Head, alone
from hasten.ops.loss.pieces import loss_and_gradient, loss_and_gradients, rows_of_a_chunk, triton_rows


def chunked(x: Tensor, targets: Tensor, head: Head, *, chunk_rows: int | None = None) -> Tensor:
    """Same contract as `reference`. Matrix products in x's dtype, everything else in float32.

    chunk_rows: rows of x whose logits are made at a time (None: some 64 MiB of them). Its backward pass can run once.
    """
    if torch.compiler.is_compiling() and head.meet is alone:
        return compiled_loss(x, targets, head, chunk_rows=chunk_rows, triton=False)
    return _chunks(x, targets, head, chunk_rows or rows_of_a_chunk(head.weight.shape[0]), loss_and_gradient)


def chunked_triton(x: Tensor, targets: Tensor, head: Head, *, chunk_rows: int | None = None) -> Tensor:
    """`chunked` with one Triton kernel for everything between a chunk's products; imported only when used."""
    if torch.compiler.is_compiling() and head.meet is alone:
        return compiled_loss(x, targets, head, chunk_rows=chunk_rows)
    make, rows_of = kernel_of("chunked-triton")
    return _chunks(x, targets, head, chunk_rows or rows_of(x.shape[0], head.weight.shape[0]), make)


def kernel_of(name: str) -> tuple[Callable[..., Tensor | None], Callable[[int, int], int]]:
    """What "chunked" or "chunked-triton" makes of a chunk, and the rows of a chunk by those of x and the weight."""
    if name == "chunked":
        return loss_and_gradient, lambda rows, width: rows_of_a_chunk(width)
    from hasten.ops.loss.triton_loss import loss_and_gradient as make

    return make, triton_rows


def _chunks(x: Tensor, targets: Tensor, head: Head, rows: int, make: Callable[..., Tensor | None]) -> Tensor:
    loss: Tensor = _Chunked.apply(x, head.weight, head.bias, targets, head, rows, torch.is_grad_enabled(), make)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        rows: int,
        grad_enabled: bool,
        make: Callable[..., Tensor | None],
    ) -> Tensor:
        needed = tuple(grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        head = head._replace(weight=weight, bias=bias)
        loss, *gradients = loss_and_gradients(x, targets, head, rows, make, needed)
        ctx.gradients = tuple(gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = outputs
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward pass; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        # In place, because a copy of the weight's gradient is what this kernel saves. PyTorch casts each to its dtype.
        return (
            *(None if gradient is None else gradient.mul_(factor) for gradient in gradients),
            *(None,) * 5,
        )
