"""The kinds of layers that keep a state of each sequence, by their configs."""

from collections.abc import Callable, Mapping

from hasten.model.config import ModelConfig
from hasten.model.delta import GatedDeltaNet
from hasten.model.mamba import Mamba2
from hasten.model.mixer import StateMixer
from hasten.model.mixer_config import ConvolutionConfig, DeltaConfig, MambaConfig, MixerConfig
from hasten.model.short_convolution import ShortConvolution

_KINDS: Mapping[type[MixerConfig], Callable[..., StateMixer]] = {
    DeltaConfig: GatedDeltaNet,
    ConvolutionConfig: ShortConvolution,
    MambaConfig: Mamba2,
}


def mixer_of(config: ModelConfig) -> StateMixer:
    """Create the layer that keeps a state in a model of this config, uninitialized."""
    sizes = config.state_mixer
    return _KINDS[type(sizes)](sizes, config.hidden_size, config.norm_eps)
