"""What each layer keeps of a text: keys and values of each token, or a state of each sequence."""

from __future__ import annotations

from typing import NamedTuple

from hasten.engine.states import StateShape
from hasten.model.config import LayerConfig, ModelConfig


class LayerShape(NamedTuple):
    """What a layer keeps of each token: a key and a value for each of its heads.

    tensors: 2, of keys and of values, or 1 of what is both.
    """

    kv_heads: int
    head_dim: int
    tensors: int = 2


def layer_shapes(config: ModelConfig) -> list[LayerShape | StateShape | None]:
    """The shape of each layer; one that uses another's keys and values has the other's, an MLP alone has none."""
    tensors = 2 if config.latent is None else 1

    def own(layer: LayerConfig) -> LayerShape | StateShape | None:
        if layer.attends:
            return LayerShape(config.kv_heads_of(layer), config.head_dim_of(layer), tensors)
        return StateShape(config.state_mixer) if layer.keeps_state else None

    return [own(layer) for layer in config.layers]


def kept_shapes(config: ModelConfig) -> list[LayerShape]:
    """The shapes of the layers that keep keys and values of their own."""
    pairs = zip(layer_shapes(config), config.layers, strict=True)
    return [shape for shape, layer in pairs if isinstance(shape, LayerShape) and layer.keys_of is None]
