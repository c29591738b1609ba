"""All experts of a layer at once: the operator, its kernels and what they support."""

from hasten.ops.experts.operator import KERNELS, ExpertsRequest, ExpertWeights, Grouped

__all__ = ["KERNELS", "ExpertWeights", "ExpertsRequest", "Grouped"]
