"""Weights rounded in the two usual formats."""

import torch

from hasten.ops.linear import INT8, QuantizedWeight, int4_format
from hasten.quantization.rounding import round_weight


def round_int8(weight: torch.Tensor) -> QuantizedWeight:
    """One scale a row."""
    return round_weight(weight, INT8)


def round_int4(weight, *, group_size=128, symmetric=True, search="mse", scale_dtype=torch.bfloat16) -> QuantizedWeight:
    """One scale for each `group_size` values of a row."""
    return round_weight(weight, int4_format(group_size, symmetric=symmetric, scale_dtype=scale_dtype), search=search)
