"""The loss as it is defined: all logits, in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def reference(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sum of the cross-entropies (nats) of x (N, C) against targets (N,); float32, or float64 where x has it."""
    logits = F.linear(x, weight, bias)[:, :vocab_size]  # (N, V): the rows of the padding are cut off
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
