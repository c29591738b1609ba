"""The products behind the linear operator. All take what the native one takes:

    product(x (…, K), data, scales, zeros, bias (N,) or None, out_features N, group_size, digits) -> (…, N)

in x's dtype. `digits` is how many int8 digits an activation becomes where the kernel multiplies integers: 1 is int8
with one scale a row (int8 weights) or a group (int4), 2 is 16 bits, closer to x than bfloat16 is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.linear.layouts import ROWS, Packed, Shape
from hasten.ops.linear.weights import QuantizedWeight


def reference(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    digits: int,
) -> Tensor:
    """Dequantize W from the rows layout to float32 and multiply in float32: slow, and obviously right."""
    weight = ROWS.rows(Packed(data, scales, zeros), _shape(x, data, out_features, group_size), None)
    full = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()
    return F.linear(x.float(), full, None if bias is None else bias.float()).to(x.dtype)


def pytorch(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    digits: int,
) -> Tensor:
    """PyTorch's product in x's dtype. int8 values are exact in it, so their scales multiply the outputs (as gpt-fast
    does, which a compiler fuses); int4 weights are rounded to it first.

    torch._weight_int8pack_mm is not used: in torch 2.13 it crashes where K is not a multiple of 16.
    """
    if data.dtype == torch.int8:
        assert scales is not None
        y = F.linear(x, data.to(x.dtype)) * scales.flatten()
        return (y if bias is None else y + bias).to(x.dtype)
    weight = ROWS.rows(Packed(data, scales, zeros), _shape(x, data, out_features, group_size), None)
    plain = weight.dequantize(x.dtype) if isinstance(weight, QuantizedWeight) else weight.to(x.dtype)
    return F.linear(x, plain, None if bias is None else bias.to(x.dtype))


def _shape(x: Tensor, data: Tensor, out_features: int, group_size: int) -> Shape:
    name = {torch.bfloat16: "bfloat16", torch.int8: "int8", torch.uint8: "int4"}[data.dtype]
    return Shape(out_features, x.shape[-1], name, group_size)
