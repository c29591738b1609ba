"""The state of a layer, and the view of it for kernels that go from state to state themselves."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from hasten.ops.attention.view import AttentionMetadata

# What a layer keeps of each of n sequences, tensors (n, …) by their names. "inputs" (n, K - 1, channels): the last
# values before its convolution. "matrix", where it has heads: float32 (n, H, …, …).
State = Mapping[str, Tensor]


class StateView(NamedTuple):
    """One layer's states during one step.

    held: those of all places. slots int64 (B,): the place of each of the step's sequences. certain int64 (B,): after
    how many of its tokens a state is kept, None: after all. metadata: which of the step's tokens are whose. plan: held
    as the native blocks take it (`CachePlan`).
    """

    held: State
    slots: Tensor
    certain: Tensor | None
    metadata: AttentionMetadata
    plan: Tensor | None = None
