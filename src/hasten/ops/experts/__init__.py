"""All experts of a layer at once: the operator, its kernels and what they support."""

from hasten.ops.experts.operator import KERNELS, ExpertsRequest, Grouped
from hasten.ops.experts.weights import ExpertWeights

__all__ = ["KERNELS", "ExpertWeights", "ExpertsRequest", "Grouped"]
