"""A chunk's losses and their gradient in one Triton kernel, over logits in the dtype of the products.

A program has a row of logits: it reads the row for the maximum and the sum, and again, out of the L2 cache, for the
gradient, which it writes over the logits. PyTorch's operations of chunked.py would read and write the chunk ten times
in float32. The idea of writing in place is Liger's (arXiv 2410.10989).

Import this file only where the kernel is taken; it imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.ops.fp8 import Fp8
from hasten.ops.loss.kernels import IGNORED, Head
from hasten.ops.loss.pieces import logits_of
from hasten.ops.triton_fp8 import scale_of
from hasten.ops.triton_support import readable

BLOCK = 4096  # logits of a step
WARPS = 8


@triton.jit
def load(logits, bias, places, inside, known):
    """Logits of a row, with their bias, in float32; -inf where no token is known.

    inside: mask of the padded row, whose end is aligned so that loads are vectorized.
    """
    x = tl.load(logits + places, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    return tl.where(known, x, float("-inf"))


@triton.jit
def kernel(
    logits,  # (rows, row_stride), in whose place the gradient comes
    bias,  # (row_stride,), or None
    targets,  # (rows,)
    losses,  # (rows,)
    scale,  # (1,) float32, what the gradient is multiplied with, or None
    narrow,  # (rows, row_stride) in FP8: the gradient again, or None
    narrow_scale,  # (1,) float32
    vocabulary,
    row_stride,
    IGNORED: tl.constexpr,
    NEED: tl.constexpr,  # the gradient too
    BLOCK: tl.constexpr,
):
    """One row of logits, of which the first `vocabulary` are tokens: its loss, infinite for a target that is none, and
    softmax - one-hot; zeros for a row that predicts nothing, and for the padding. In FP8 all rows have one scale: no
    magnitude is above `scale`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    # Before the reductions, behind which the gradient is written over it.
    own = load(logits, bias, target, known, known)
    places = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        here = start + places
        x = load(logits, bias, here, here < row_stride, here < vocabulary)
        new = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
        top = new
    counts = target != IGNORED
    tl.store(losses + row, tl.where(counts, tl.log(total) + top - own, 0.0))
    if NEED:
        largest = 1.0
        if scale is not None:
            largest = tl.load(scale)
        share = tl.where(counts, largest, 0.0)
        if narrow is not None:
            one = scale_of(largest)
            if row == 0:
                tl.store(narrow_scale, one)
        for start in range(0, row_stride, BLOCK):
            here = start + places
            x = load(logits, bias, here, here < row_stride, here < vocabulary)
            gradient = share * (tl.exp(x - top) / total - tl.where(here == target, 1.0, 0.0))
            tl.store(logits + here, gradient.to(logits.dtype.element_ty), mask=here < row_stride)
            if narrow is not None:
                low = (gradient * (1.0 / one)).to(narrow.dtype.element_ty)
                tl.store(narrow + row * row_stride + here, low, mask=here < row_stride)


def loss_and_gradient(
    part: Tensor, wanted: Tensor, head: Head, loss: Tensor, narrow: Fp8 | None = None, *, need: bool
) -> Tensor | None:
    """The Triton form of `pieces.loss_and_gradient`; the gradient is in the dtype of the products."""
    logits = readable(logits_of(part, head))
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    bias = None if head.bias is None else head.bias.contiguous()
    with torch.cuda.device_of(logits):
        kernel[(len(logits),)](
            *(logits, bias, wanted.contiguous(), losses, head.scale, *(narrow or (None, None))),
            *(head.vocab_size, logits.shape[1]),
            IGNORED=IGNORED,
            NEED=need,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    loss += losses.sum()
    return logits if need else None
