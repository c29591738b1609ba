"""The chunked loss as one operator of a compiled graph: opaque to the compiler, with its gradients made on the way.

The backward pass multiplies the gradients by what comes in; compiled, that is part of whatever reads them next.
"""

from typing import Any

import torch
from torch import Tensor

from hasten.ops.loss.kernels import Head
from hasten.ops.loss.pieces import loss_and_gradient, loss_and_gradients, rows_of_a_chunk, triton_rows


def compiled_loss(
    x: Tensor, targets: Tensor, head: Head, *, chunk_rows: int | None = None, triton: bool = True
) -> Tensor:
    """`chunked` (with triton: `chunked_triton`) inside a compiled graph, for a head that is not split over ranks."""
    assert head.fp8 is None
    width = head.weight.shape[0]
    if chunk_rows is None:
        chunk_rows = triton_rows(x.shape[0], width) if triton else rows_of_a_chunk(width)
    grad = torch.is_grad_enabled()
    need = [grad and one is not None and one.requires_grad for one in (x, head.weight, head.bias)]
    loss: Tensor = operator(
        x, head.weight, head.bias, targets, head.vocab_size, head.softcap, chunk_rows, triton, need
    )[0]
    return loss


@torch.library.custom_op("hasten::linear_loss", mutates_args=())
def operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    softcap: float | None,
    chunk_rows: int,
    triton: bool,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of x, weight and bias, empty where they are not needed."""
    if triton:
        from hasten.ops.loss.triton_loss import loss_and_gradient as make
    else:
        make = loss_and_gradient
    head = Head(weight, vocab_size, bias, softcap)
    loss, *gradients = loss_and_gradients(x, targets, head, chunk_rows, make, (need[0], need[1], need[2]))
    grad_x, grad_weight, grad_bias = (loss.new_empty(0) if one is None else one for one in gradients)
    return loss, grad_x, grad_weight, grad_bias


@operator.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    targets: Any,
    vocab_size: Any,
    softcap: Any,
    chunk_rows: Any,
    triton: Any,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    loss = x.new_empty((), dtype=wide)
    return (
        loss,
        x.new_empty(x.shape) if need[0] else loss.new_empty(0),
        x.new_empty(weight.shape, dtype=wide) if need[1] else loss.new_empty(0),
        x.new_empty(weight.shape[0], dtype=wide) if need[2] else loss.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = inputs[1].dtype, None if inputs[2] is None else inputs[2].dtype
    ctx.need = inputs[8]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, factor: Tensor | None, *_: None) -> tuple[Any, ...]:
    if factor is None:
        return (None,) * 9
    x, weight, bias = ctx.saved_tensors
    return (
        (x.float() * factor).to(x.dtype) if ctx.need[0] else None,
        (weight * factor).to(ctx.dtypes[0]) if ctx.need[1] else None,
        (bias * factor).to(ctx.dtypes[1]) if ctx.need[2] else None,
        *(None,) * 6,
    )


operator.register_autograd(_backward, setup_context=_save)
