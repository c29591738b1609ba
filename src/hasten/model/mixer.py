"""The base of the layers that keep a state of each sequence, in a block's place of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten.model.mixer_config import MixerConfig
from hasten.ops.states import State

if TYPE_CHECKING:
    from hasten.model.interfaces import StateContext
    from hasten.model.mlp import Linear


def new_states(sizes: MixerConfig, sequences: int, dtype: torch.dtype, device: torch.device) -> State:
    """Create the places of one layer for the states of `sequences` sequences. dtype: of the tensors not float32."""
    return {
        name: torch.zeros(sequences, *one.size, dtype=torch.float32 if one.wide else dtype, device=device)
        for name, one in sizes.state.items()
    }


class StateMixer(nn.Module):
    """The products of the layer's input by their names, `conv`, and `out`, as `MixerConfig` gives their sizes."""

    sizes: Any  # the config of its kind
    conv: nn.Conv1d
    out: Linear

    def __init__(self, sizes: MixerConfig, hidden: int) -> None:
        super().__init__()
        self.sizes = sizes
        for name, features in sizes.inputs.items():
            self.add_module(name, nn.Linear(hidden, features, bias=sizes.bias))
        channels, bias = sizes.channels, "conv.bias" in sizes.vectors
        self.conv = nn.Conv1d(channels, channels, sizes.kernel, groups=channels, bias=bias)
        self.out = nn.Linear(sizes.values, hidden, bias=sizes.bias)

    def forward(self, x: Tensor, layer: StateContext) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        raise NotImplementedError

    @staticmethod
    def fill(leaf: str, values: Tensor, generator: torch.Generator) -> None:
        """Fill a parameter that belongs to no other layer, as the published models were begun."""
        raise NotImplementedError(f"{leaf} has no initial values")
