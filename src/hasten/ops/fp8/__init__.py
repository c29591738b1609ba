"""Products in FP8 for training, and the layers of a transformer that consist of them, with their gradients."""

from hasten.ops.fp8.layers import Branch, States, add_norm, linear, mlp, project
from hasten.ops.fp8.products import E4M3, MULTIPLE, WIDEST, Fp8, product, rounded, scale_of, weight_gradient, why_not
from hasten.ops.fp8.weights import Fp8Weight, Fp8Weights

__all__ = [
    "E4M3",
    "MULTIPLE",
    "WIDEST",
    "Branch",
    "Fp8",
    "Fp8Weight",
    "Fp8Weights",
    "States",
    "add_norm",
    "linear",
    "mlp",
    "product",
    "project",
    "rounded",
    "scale_of",
    "weight_gradient",
    "why_not",
]
