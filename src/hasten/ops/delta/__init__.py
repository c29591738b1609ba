"""Gated DeltaNet (arXiv 2412.06464): a matrix a head that each token decays, corrects and reads, behind a convolution.

`recurrent_delta_rule` goes token by token and is the reference; `chunked_delta_rule` computes the same in matrix
products. `causal_convolution` mixes a token with the few before it. What both keep of a sequence is a `DeltaState`.
phases.h and delta.cpp compute the same natively, in one pass behind the projections.
"""

from hasten.ops.delta.convolution import causal_convolution
from hasten.ops.delta.groups import SequenceGroup, group_sequences, in_groups
from hasten.ops.delta.rule import CHUNK, DeltaState, chunked_delta_rule, delta_rule, recurrent_delta_rule
from hasten.ops.delta.view import StateView

__all__ = [
    "CHUNK",
    "DeltaState",
    "SequenceGroup",
    "StateView",
    "causal_convolution",
    "chunked_delta_rule",
    "delta_rule",
    "group_sequences",
    "in_groups",
    "recurrent_delta_rule",
]
