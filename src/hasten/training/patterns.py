"""What a recipe changes in a pretrained model: sparse attention patterns and dropout.

`--init MODEL --model.attention-pattern bigbird`
"""

from dataclasses import replace

from torch import nn

from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.config import ModelConfig
from hasten.model.transformer import Transformer
from hasten.ops.attention.block_mask import tiles_refusal
from hasten.ops.attention.pattern_text import parse_pattern
from hasten.training.recipe import Shape


def with_pattern(config: ModelConfig, shape: Shape) -> ModelConfig:
    """The config of a pretrained model, with the recipe's pattern, if it has one, instead of the model's own.

    A layer with a window sees the keys that window and pattern both allow. Soft-capped scores are computed explicitly
    if no sparse kernel supports them. Raises ConfigError for an unknown pattern, or one whose blocks fit no kernel.
    """
    if shape.attention_pattern is None:
        return config
    if config.keeps_states:
        raise ConfigError(f"model.attention_pattern: a {config.family} keeps states, which have no sparse pattern")
    if config.latent is not None:
        raise ConfigError(f"model.attention_pattern: a {config.family} has latent attention, without sparse patterns")
    pattern = parse_pattern(shape.attention_pattern)
    reason = None if pattern.period is not None else tiles_refusal(pattern.block)
    if reason is not None:
        raise ConfigError(f"model.attention_pattern {shape.attention_pattern}: {reason}")
    return replace(config, attention_pattern=pattern)


def give_pattern(model: Transformer, shape: Shape) -> None:
    """Give a loaded model the recipe's pattern, in its layers and its config."""
    model.config = with_pattern(model.config, shape)
    for module in model.modules():
        if isinstance(module, Attention):
            module.take_pattern(model.config.attention_pattern)
            model.bound = False


def set_dropout(model: Transformer, probability: float) -> None:
    """Set the dropout of a loaded model, whose checkpoint has none."""
    model.config = replace(model.config, dropout=probability)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        elif isinstance(module, Attention):
            module.dropout = probability
