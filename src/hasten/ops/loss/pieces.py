"""A chunk of rows after the other: the loss and its gradients, with the logits of one chunk in memory.

`make` turns a chunk into its losses and the gradient by its logits: here in PyTorch's operations, in triton_loss.py as
one kernel.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from hasten.ops import fp8
from hasten.ops.loss.kernels import IGNORED, Head

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
    return min(most, -(-rows // chunks // ROW_MULTIPLE) * ROW_MULTIPLE)


def loss_and_gradients(
    x: Tensor, targets: Tensor, head: Head, rows: int, make: Callable[..., Tensor | None], needed: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and the gradients of x, weight and bias as far as they are needed; the weight in any dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    by_x, by_weight, by_bias = needed
    shape = head.weight.shape
    head = head._replace(weight=head.weight.to(x.dtype))
    if head.fp8:
        head = head._replace(fp8=fp8.rounded(head.weight))
    loss = torch.zeros((), dtype=wide, device=x.device)
    grad_x = torch.empty_like(x) if by_x else None
    grad_weight = torch.zeros(shape, dtype=wide, device=x.device) if by_weight and not len(x) else None
    grad_bias = torch.zeros(shape[0], dtype=wide, device=x.device) if by_bias else None
    for start in range(0, x.shape[0], rows):
        part, wanted = x[start : start + rows], targets[start : start + rows]
        gradient = make(part, wanted, head, loss, need=any(needed))
        if gradient is None:
            continue
        if grad_bias is not None:
            grad_bias += gradient.sum(0, dtype=wide)
        narrow = gradient.to(x.dtype)  # (n, rows of the weight)
        if grad_x is not None:
            torch.mm(narrow, head.weight, out=grad_x[start : start + rows])
        if by_weight:
            # Chunks are added up in float32 whatever the products are in.
            grad_weight = add_product(grad_weight, narrow.t(), part, wide)
        del gradient, narrow  # before the next chunk's logits are made
    return loss, grad_x, grad_weight, grad_bias


def logits_of(part: Tensor, head: Head) -> Tensor:
    """(n, rows of the weight), without bias, in part's dtype."""
    if isinstance(head.fp8, tuple):
        return fp8.product(fp8.rounded(part), head.fp8, part.dtype, fast=True)
    return part @ head.weight.t()


def add_product(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """total += a·b, or a·b where there is no total yet, with the sum in `wide`."""
    in_one = a.is_cuda and a.dtype != wide and _adds_wide(a.dtype, a.device)
    if total is None:
        return torch.mm(a, b, out_dtype=wide) if in_one else (a @ b).to(wide)
    if a.dtype == wide:
        total.addmm_(a, b)
    elif in_one:
        torch.addmm(total, a, b, out_dtype=wide, out=total)
    else:
        total += a @ b
    return total


@cache
def _adds_wide(dtype: torch.dtype, device: torch.device) -> bool:
    """cuBLAS multiplies 16-bit matrices onto a float32 one; this torch passes that on."""
    a = torch.eye(16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        torch.mm(a, a, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return bool(total.sum().item() == 16 * 16 + 16)


def loss_and_gradient(part: Tensor, wanted: Tensor, head: Head, loss: Tensor, *, need: bool) -> Tensor | None:
    """Add a chunk's losses to `loss`; the gradient by its logits (n, rows of the weight) if needed."""
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
    return logits if slope is None else logits.mul_(slope)
