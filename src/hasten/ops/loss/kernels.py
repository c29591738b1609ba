"""The loss as it is defined, and PyTorch's own; ours, in chunks, is in chunked.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from hasten.ops.fp8 import Fp8Weight

IGNORED = -100


def alone(numbers: Tensor, operation: str) -> Tensor:
    """For a head that has all rows."""
    return numbers


class Head(NamedTuple):
    """What makes logits of x (N, C): weight (rows, C), of whose rows the first `vocab_size` are tokens and the others
    padding; a bias (rows,); soft-capping. Or a process's part of such: its rows begin with the whole's row `first`, and
    `meet` gives the "sum" or the "max" of what all processes hand in, numbers of one shape. fp8: the weight in FP8, of
    which the chunked kernels make their logits and the gradient of x; that of the weight is a product in x's dtype.
    scale (float32, 0-dim): what the gradients, not the loss, are multiplied with (None: nothing).
    """

    weight: Tensor
    vocab_size: int
    bias: Tensor | None = None
    softcap: float | None = None
    first: int = 0
    meet: Callable[[Tensor, str], Tensor] = alone
    fp8: Fp8Weight | None = None
    scale: Tensor | None = None


def reference(x: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Sum of the cross-entropies (nats) of x (N, C) against targets (N,); float32, or float64 where x has it.

    All logits are there at once.
    """
    logits = F.linear(x, head.weight, head.bias)[:, : head.vocab_size]  # (N, V): the rows of the padding are cut off
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def torch_loss(x: Tensor, targets: Tensor, head: Head) -> Tensor:
    """PyTorch's own chunked linear cross-entropy (torch.nn.functional, from 2.13).

    Same contract as `reference`, without soft-capping; weight and bias in x's dtype. Padded rows stay in the products,
    as their sizes should.
    """
    assert head.softcap is None
    rows, bias = head.weight.shape[0], head.bias
    if rows > head.vocab_size:
        # It knows no padding, but a bias: e^-inf is no probability, and the gradient of the row is zero.
        edge = x.new_zeros(rows)
        edge[head.vocab_size :] = float("-inf")
        bias = edge if bias is None else bias + edge
    loss = F.linear_cross_entropy(
        x,
        head.weight,
        targets,
        linear_bias=bias,
        reduction="sum",
        ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
