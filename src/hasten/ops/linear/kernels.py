"""The linear operator's products that are PyTorch's own: x (…, K) and a weight in rows -> (…, N) in x's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.linear.layouts import ROWS, Operands, Packed
from hasten.ops.linear.weights import INT8
from hasten.ops.linear.wide import wide_linear


def reference(x: Tensor, weight: Operands) -> Tensor:
    """Dequantize W from the rows layout to float32 and multiply in float32: slow, and obviously right."""
    bias = None if weight.bias is None else weight.bias.float()
    return F.linear(x.float(), _dequantized(x, weight, torch.float32), bias).to(x.dtype)


def pytorch(x: Tensor, weight: Operands) -> Tensor:
    """PyTorch's product in x's dtype. int8 values are exact in it, so their scales multiply the outputs where a row has
    one (as gpt-fast does, which a compiler fuses); other weights are rounded to it first.

    torch._weight_int8pack_mm is not used: in torch 2.13 it crashes where K is not a multiple of 16.
    """
    if weight.format == INT8:
        assert weight.scales is not None
        y = wide_linear(x, weight.data, None) * weight.scales.flatten()
        return (y if weight.bias is None else y + weight.bias).to(x.dtype)
    if weight.data.dtype == torch.bfloat16 and x.dtype == torch.float32:
        return wide_linear(x, weight.data, weight.bias)
    bias = None if weight.bias is None else weight.bias.to(x.dtype)
    return F.linear(x, _dequantized(x, weight, x.dtype), bias)


def float32(x: Tensor, weight: Operands) -> Tensor:
    """`pytorch` in float32, for a processor that only emulates products in x's dtype."""
    return pytorch(x.float(), weight).to(x.dtype)


def _dequantized(x: Tensor, weight: Operands, dtype: torch.dtype) -> Tensor:
    """W (N, K)."""
    packed = Packed(weight.data, weight.scales, weight.zeros, weight.outer)
    return ROWS.rows(packed, weight.format, (weight.out_features, x.shape[-1]), None).dequantize(dtype)
