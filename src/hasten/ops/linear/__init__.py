"""Linear layers of bf16, int8 and int4 weights: the operator's kernels, the packed layouts, the modules."""

from hasten.ops.linear.modules import PackedLinear
from hasten.ops.linear.operator import KERNELS, LinearRequest
from hasten.ops.linear.weights import BFLOAT16, INT8, QuantizedWeight, WeightFormat, int4_format

__all__ = [
    "BFLOAT16",
    "INT8",
    "KERNELS",
    "LinearRequest",
    "PackedLinear",
    "QuantizedWeight",
    "WeightFormat",
    "int4_format",
]
