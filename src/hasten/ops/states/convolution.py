"""The causal depthwise convolution of layers that keep states: a weighted sum of a channel's last few values."""

import torch
from torch import Tensor


def causal_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y[t] = Σ_j weight[:, j] · x[t - K + 1 + j] + bias, in float32 (float64 for such x), and what the next call needs.

    x (n, T, channels), weight (channels, K), bias (channels,). before (n, K - 1, channels): the values before the first
    token; None: zeros. Returns y (n, T, channels) and the last K - 1 values, in the dtype of x.
    """
    kernel, tokens = weight.shape[-1], x.shape[1]
    if before is None:
        before = x.new_zeros(x.shape[0], kernel - 1, x.shape[2])
    whole = torch.cat((before.to(x.dtype), x), dim=1)  # (n, K - 1 + T, channels)
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, factors = whole.to(dtype), weight.to(dtype)
    y = wide[:, :tokens] * factors[:, 0]
    for place in range(1, kernel):
        y = y + wide[:, place : place + tokens] * factors[:, place]
    return y if bias is None else y + bias.to(dtype), whole[:, tokens:]
