"""PyTorch's own chunked linear cross-entropy (torch.nn.functional, from 2.13)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.loss.reference import IGNORED


def torch_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same contract as `reference`, without soft-capping; weight and bias in x's dtype.

    Padded rows stay in the products, as their sizes should.
    """
    assert softcap is None
    rows = weight.shape[0]
    if rows > vocab_size:
        # It knows no padding, but a bias: e^-inf is no probability, and the gradient of the row is zero.
        edge = x.new_zeros(rows)
        edge[vocab_size:] = float("-inf")
        bias = edge if bias is None else bias + edge
    loss = F.linear_cross_entropy(
        x,
        weight,
        targets,
        linear_bias=bias,
        reduction="sum",
        ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
