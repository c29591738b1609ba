"""Linear layers of bf16, int8 and int4 weights: the operator's kernels, the packed layouts, the modules."""

from hasten.ops.linear.embedding import PackedEmbedding
from hasten.ops.linear.fused import NormArguments, fused_linear
from hasten.ops.linear.layouts import empty_weight
from hasten.ops.linear.modules import PackedLinear, request_of
from hasten.ops.linear.operator import KERNELS, LinearRequest
from hasten.ops.linear.weights import BFLOAT16, INT8, QuantizedWeight, Scales, WeightFormat, int4_format

__all__ = [
    "BFLOAT16",
    "INT8",
    "KERNELS",
    "LinearRequest",
    "NormArguments",
    "PackedEmbedding",
    "PackedLinear",
    "QuantizedWeight",
    "Scales",
    "WeightFormat",
    "empty_weight",
    "fused_linear",
    "int4_format",
    "request_of",
]
