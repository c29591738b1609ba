"""Head and cross-entropy in one: `linear_cross_entropy(x, weight, targets)`, without all logits in memory at once.

All kernels share one signature, `kernel(x, targets, head)`, with x of shape (N, C), targets int64 (N,), -100 where
nothing is to be predicted, and a `Head` (kernels.py); they return the sum of the losses, a float32 scalar.
"""

from hasten.ops.loss.operator import IGNORED, KERNELS, LossRequest, choose_loss, linear_cross_entropy
from hasten.ops.loss.pieces import TRITON_CHUNK_ELEMENTS, rows_of_a_chunk

__all__ = [
    "IGNORED",
    "KERNELS",
    "TRITON_CHUNK_ELEMENTS",
    "LossRequest",
    "choose_loss",
    "linear_cross_entropy",
    "rows_of_a_chunk",
]
