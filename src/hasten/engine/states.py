"""States that layers keep of each sequence, whatever its length: their shape, and one layer's context in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.model.mixer import new_states
from hasten.model.mixer_config import MixerConfig
from hasten.ops.attention.view import AttentionMetadata
from hasten.ops.states import SequenceGroup, State, StateView, group_sequences, in_groups


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a layer keeps of each sequence, by the sizes of its kind."""

    sizes: MixerConfig

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's state. dtype: of the tensors that are not float32."""
        tensors = self.sizes.state.values()
        return sum(math.prod(one.size) * (torch.float32 if one.wide else dtype).itemsize for one in tensors)

    def zeros(self, sequences: int, dtype: torch.dtype, device: torch.device) -> State:
        """Create places for the states of `sequences` sequences."""
        return new_states(self.sizes, sequences, dtype, device)


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's states during one step; see `StateContext`.

    held: those of all sequences. groups: of the step's. slots, certain, metadata, plan: as in `StateView`.
    """

    held: State
    groups: Sequence[SequenceGroup]
    slots: Tensor
    certain: Tensor | None
    metadata: AttentionMetadata
    plan: Tensor | None = None

    def state_view(self, *, batch: int, tokens: int, sizes: MixerConfig) -> StateView:
        """For a kernel that goes from state to state itself."""
        return StateView(self.held, self.slots, self.certain, self.metadata, self.plan)

    def recur(self, run: Callable[..., tuple[Tensor, State]], *inputs: Tensor) -> Tensor:
        """Compute the step's tokens, group by group, and keep the states after them."""

        def step(group: SequenceGroup, *own: Tensor) -> Tensor:
            before = None if group.fresh else {name: tensor[group.slots] for name, tensor in self.held.items()}
            certain = own[0].shape[1] if group.certain is None else group.certain
            outputs, after = run(before, *(one[:, :certain] for one in own))
            for name, kept in self.held.items():
                kept[group.slots] = after[name].to(kept.dtype)
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
