"""States that layers keep of each sequence, whatever its length: their shape, and one layer's context in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.model.config import DeltaConfig
from hasten.ops.attention.view import AttentionMetadata
from hasten.ops.delta import DeltaState, SequenceGroup, StateView, group_sequences, in_groups


class StateShape(NamedTuple):
    """What a layer with Gated DeltaNet keeps of each sequence: the shapes of a `DeltaState`."""

    inputs: tuple[int, int]
    matrix: tuple[int, int, int]

    @classmethod
    def of(cls, sizes: DeltaConfig) -> StateShape:
        """The shape for layers of these sizes."""
        return cls((sizes.kernel - 1, sizes.channels), (sizes.value_heads, sizes.key_dim, sizes.value_dim))

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's state. dtype: of the inputs of the convolution; the matrices are float32."""
        return math.prod(self.inputs) * dtype.itemsize + math.prod(self.matrix) * torch.float32.itemsize

    def zeros(self, sequences: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
        """Create places for the states of `sequences` sequences."""
        inputs = torch.zeros(sequences, *self.inputs, dtype=dtype, device=device)
        return DeltaState(inputs, torch.zeros(sequences, *self.matrix, device=device))


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's states during one step; see `StateContext`.

    held: those of all sequences. groups: of the step's. slots, certain, metadata: as in `StateView`.
    """

    held: DeltaState
    groups: Sequence[SequenceGroup]
    slots: Tensor
    certain: Tensor | None
    metadata: AttentionMetadata

    def state_view(self, *, batch: int, tokens: int, sizes: DeltaConfig) -> StateView:
        """For a kernel that goes from state to state itself."""
        return StateView(self.held, self.slots, self.certain, self.metadata)

    def recur(self, run: Callable[..., tuple[Tensor, DeltaState]], *inputs: Tensor) -> Tensor:
        """Compute the step's tokens, group by group, and keep the states after them."""

        def step(group: SequenceGroup, *own: Tensor) -> Tensor:
            before = None if group.fresh else DeltaState(*(tensor[group.slots] for tensor in self.held))
            certain = own[0].shape[1] if group.certain is None else group.certain
            outputs, after = run(before, *(one[:, :certain] for one in own))
            for kept, new in zip(self.held, after, strict=True):
                kept[group.slots] = new.to(kept.dtype)
            if certain == own[0].shape[1]:
                return outputs
            return torch.cat((outputs, run(after, *(one[:, certain:] for one in own))[0]), dim=1)

        return in_groups(self.groups, step, inputs)


def groups_of_texts(positions: Tensor, valid: Tensor | None, slots: Sequence[int]) -> list[SequenceGroup]:
    """Group the texts of a step at positions (B, T). valid bool (B, T): tokens to compute, the first ones of each."""
    batch, tokens = positions.shape
    counts = [tokens] * batch if valid is None else valid.sum(1).tolist()
    return group_sequences(
        range(0, batch * tokens, tokens),
        counts,
        tokens=batch * tokens,
        device=positions.device,
        starts=positions[:, 0].tolist(),
        slots=slots,
    )
