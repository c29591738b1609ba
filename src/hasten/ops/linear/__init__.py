"""Linear layers of bf16, int8 and int4 weights: the operator's kernels, the packed layouts, the modules."""

from hasten.ops.linear.modules import PackedLinear
from hasten.ops.linear.operator import KERNELS, LinearRequest
from hasten.ops.linear.weights import QuantizedWeight

__all__ = ["KERNELS", "LinearRequest", "PackedLinear", "QuantizedWeight"]
