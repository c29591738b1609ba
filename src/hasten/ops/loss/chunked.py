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

from hasten.ops.loss.kernels import IGNORED, Head

# Logits in memory at once: 64 MiB in float32. More rows a chunk read the weight less often, which no longer shows here.
CHUNK_ELEMENTS = 1 << 24
TRITON_CHUNK_ELEMENTS = 1 << 27  # 256 MiB in 16 bits: a GPU wants large products, and one kernel works on them
ROW_MULTIPLE = 64


def chunked(x: Tensor, targets: Tensor, head: Head, *, chunk_rows: int | None = None) -> Tensor:
    """Same contract as `reference`. Matrix products in x's dtype, everything else in float32.

    chunk_rows: rows of x whose logits are made at a time (None: some 64 MiB of them). Its backward pass can run once.
    """
    return _chunks(x, targets, head, chunk_rows or rows_of_a_chunk(head.weight.shape[0]), _loss_and_gradient)


def chunked_triton(x: Tensor, targets: Tensor, head: Head, *, chunk_rows: int | None = None) -> Tensor:
    """As `chunked`, with one Triton kernel for what stands between a chunk's products; imported only where taken."""
    from hasten.ops.loss.triton_loss import loss_and_gradient

    rows = chunk_rows or rows_of_a_chunk(head.weight.shape[0], elements=TRITON_CHUNK_ELEMENTS)
    return _chunks(x, targets, head, rows, loss_and_gradient)


def rows_of_a_chunk(width: int, *, elements: int = CHUNK_ELEMENTS) -> int:
    """How many rows of `width` logits are made at a time."""
    return max(1, elements // width // ROW_MULTIPLE) * ROW_MULTIPLE


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
        wide = torch.promote_types(x.dtype, torch.float32)
        by_x, by_weight, by_bias = (grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        head = head._replace(weight=weight.to(x.dtype), bias=bias)
        loss = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if by_x else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=x.device) if by_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if by_bias else None
        for start in range(0, x.shape[0], rows):
            part, wanted = x[start : start + rows], targets[start : start + rows]
            gradient = make(part, wanted, head, loss, need=by_x or by_weight or by_bias)
            if gradient is None:
                continue
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
            narrow = gradient.to(x.dtype)  # (n, rows of the weight)
            if grad_x is not None:
                torch.mm(narrow, head.weight, out=grad_x[start : start + rows])
            if grad_weight is not None:
                # Chunks are added up in float32 whatever the products are in.
                if x.dtype == wide:
                    grad_weight.addmm_(narrow.t(), part)
                else:
                    grad_weight += narrow.t() @ part
            del gradient, narrow  # before the next chunk's logits are made
        ctx.gradients = (grad_x, grad_weight, grad_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = outputs
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward pass; compute the loss anew")
        x, weight, bias = ctx.gradients
        ctx.gradients = None  # in place, because a copy of the weight's gradient is what this kernel saves
        return (
            None if x is None else x.mul_(factor),
            None if weight is None else weight.mul_(factor).to(ctx.dtypes[0]),
            None if bias is None else bias.mul_(factor).to(ctx.dtypes[1]),
            *(None,) * 5,
        )


def _loss_and_gradient(part: Tensor, wanted: Tensor, head: Head, loss: Tensor, *, need: bool) -> Tensor | None:
    """Add a chunk's losses to `loss`; the gradient by its logits (n, rows of the weight) if needed."""
    logits = (part @ head.weight.t()).to(loss.dtype)  # (n, rows of the weight)
    if head.bias is not None:
        logits += head.bias.to(loss.dtype)
    slope = None
    if head.softcap is not None:
        logits = logits.div_(head.softcap).tanh_()
        slope = 1 - logits.square() if need else None
        logits *= head.softcap
    # The padding's rows take no probability, and get no gradient.
    logits[:, max(0, head.vocab_size - head.first) :] = float("-inf")
    counted = (wanted != IGNORED).unsqueeze(1)  # (n, 1)
    place = wanted.unsqueeze(1) - head.first
    index = place.clamp(0, logits.shape[1] - 1)
    here = place == index
    top = head.meet(logits.amax(dim=1, keepdim=True), "max")
    own = torch.where(here, logits.gather(1, index) - top, 0.0)
    logits.sub_(top).exp_()
    own, total = head.meet(torch.stack((own, logits.sum(dim=1, keepdim=True))), "sum")
    loss += torch.where(counted, total.log() - own, 0.0).sum()
    if not need:
        return None
    # softmax - one-hot, and nothing for a row that predicts nothing
    share = counted.to(logits.dtype)
    logits.mul_(share / total).scatter_add_(1, index, -share * here)
    return logits if slope is None else logits.mul_(slope)
