"""A chunk of rows after the other: the loss and its gradients, with the logits of one chunk in memory.

`make` turns a chunk into its losses and the gradient by its logits: here in PyTorch's operations, in triton_loss.py as
one kernel.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.ops import fp8
from hasten.ops.loss.kernels import IGNORED, Head
from hasten.ops.wide_sums import add_product

# Logits in memory at once: 64 MiB in float32. More rows a chunk read the weight less often, which no longer shows here.
CHUNK_ELEMENTS = 1 << 24
TRITON_CHUNK_ELEMENTS = 5 << 26  # 640 MiB in 16 bits: a GPU wants large products, and one kernel works on them
ROW_MULTIPLE = 64


def rows_of_a_chunk(width: int, *, elements: int = CHUNK_ELEMENTS) -> int:
    """How many rows of `width` logits are made at a time."""
    return max(1, elements // width // ROW_MULTIPLE) * ROW_MULTIPLE


def triton_rows(rows: int, width: int) -> int:
    """Rows of a chunk on a GPU: as few chunks as fit TRITON_CHUNK_ELEMENTS, all of about one size."""
    most = rows_of_a_chunk(width, elements=TRITON_CHUNK_ELEMENTS)
    chunks = max(1, -(-rows // most))
    return min(most, max(1, -(-rows // chunks // ROW_MULTIPLE)) * ROW_MULTIPLE)


def loss_and_gradients(
    x: Tensor, targets: Tensor, head: Head, rows: int, make: Callable[..., Tensor | None], needed: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and the gradients of x, weight and bias as far as they are needed; the weight in any dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    by_x, by_weight, by_bias = needed
    shape = head.weight.shape
    if head.fp8 is None:
        head = head._replace(weight=head.weight.to(x.dtype))
    loss = torch.zeros((), dtype=wide, device=x.device)
    grad_x = torch.empty_like(x) if by_x else None
    grad_weight = torch.zeros(shape, dtype=wide, device=x.device) if by_weight and not len(x) else None
    grad_bias = torch.zeros(shape[0], dtype=wide, device=x.device) if by_bias else None
    for start in range(0, x.shape[0], rows):
        part, wanted = x[start : start + rows], targets[start : start + rows]
        narrow = None
        if head.fp8 is not None and by_x:
            narrow = fp8.Fp8(x.new_empty((len(part), shape[0]), dtype=fp8.E4M3), loss.new_empty((1, 1)))
        gradient = make(part, wanted, head, loss, narrow, need=any(needed))
        if gradient is None:
            continue
        if grad_bias is not None:
            grad_bias += gradient.sum(0, dtype=wide)
        gradient = gradient.to(x.dtype)  # (n, rows of the weight)
        if grad_x is not None:
            _gradient_of_x(gradient, narrow, head, out=grad_x[start : start + rows])
        if by_weight:
            # Chunks are added up in float32 whatever the products are in.
            grad_weight = add_product(grad_weight, gradient.t(), part, wide)
        del gradient, narrow  # before the next chunk's logits are made
    return loss, grad_x, grad_weight, grad_bias


def logits_of(part: Tensor, head: Head) -> Tensor:
    """(n, rows of the weight), without bias, in part's dtype."""
    if head.fp8 is not None:
        return fp8.product(fp8.rounded(part), head.fp8.rows, part.dtype, fast=True)
    return part @ head.weight.t()


def _gradient_of_x(gradient: Tensor, narrow: fp8.Fp8 | None, head: Head, *, out: Tensor) -> None:
    """gradient · weight; narrow: the gradient in FP8 under one scale."""
    if narrow is None or head.fp8 is None:
        torch.mm(gradient, head.weight, out=out)
        return
    values, scales = head.fp8.columns
    fp8.product(narrow, fp8.Fp8(values, scales[:1]), out.dtype, fast=False, out=out)


def loss_and_gradient(
    part: Tensor, wanted: Tensor, head: Head, loss: Tensor, narrow: fp8.Fp8 | None = None, *, need: bool
) -> Tensor | None:
    """Add a chunk's losses to `loss`; the gradient by its logits (n, rows of the weight) if needed, in FP8 in `narrow`.

    In FP8 it has one scale: no magnitude is above that of a token's share of the loss.
    """
    logits = logits_of(part, head).to(loss.dtype)  # (n, rows of the weight)
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
    if head.scale is not None:
        share = share * head.scale
    logits.mul_(share / total).scatter_add_(1, index, -share * here)
    if slope is not None:
        logits.mul_(slope)
    if narrow is not None:
        narrow.scales.copy_(fp8.scale_of(logits.new_ones(()) if head.scale is None else head.scale.float()))
        narrow.values.copy_((logits / narrow.scales).to(fp8.E4M3))
    return logits
