"""Gated DeltaNet (arXiv 2412.06464): a matrix a head that each token decays, corrects and reads, behind a convolution.

`recurrent_delta_rule` goes token by token and is the reference; `chunked_delta_rule` computes the same in matrix
products. phases.h and delta.cpp compute the same natively, in one pass behind the projections.
"""

from hasten.ops.delta.rule import CHUNK, chunked_delta_rule, delta_rule, recurrent_delta_rule

__all__ = ["CHUNK", "chunked_delta_rule", "delta_rule", "recurrent_delta_rule"]
