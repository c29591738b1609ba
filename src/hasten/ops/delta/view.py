"""The view of the states that a layer keeps, for kernels that go from state to state themselves."""

from typing import NamedTuple

from torch import Tensor

from hasten.ops.attention.view import AttentionMetadata
from hasten.ops.delta.rule import DeltaState


class StateView(NamedTuple):
    """One layer's states during one step.

    held: those of all places. slots int64 (B,): the place of each of the step's sequences. certain int64 (B,): after
    how many of its tokens a state is kept, None: after all. metadata: which of the step's tokens are whose.
    """

    held: DeltaState
    slots: Tensor
    certain: Tensor | None
    metadata: AttentionMetadata
