"""A sparse attention pattern for a pretrained model: `--init MODEL --model.attention-pattern bigbird`."""

from dataclasses import replace

from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.model.transformer import Attention, Transformer
from hasten.ops.attention.block_mask import tiles_refusal
from hasten.ops.attention.pattern_text import parse_pattern
from hasten.training.recipe import Shape


def with_pattern(config: ModelConfig, shape: Shape) -> ModelConfig:
    """The config of a pretrained model with the recipe's pattern, where it has one, in place of its own.

    A layer with a window sees the keys that both show. Soft-capped scores are computed explicitly where no sparse
    kernel takes them. Raises ConfigError for a pattern that is unknown, or whose blocks fit no kernel.
    """
    if shape.attention_pattern is None:
        return config
    pattern = parse_pattern(shape.attention_pattern)
    reason = None if pattern.period is not None else tiles_refusal(pattern.block)
    if reason is not None:
        raise ConfigError(f"model.attention_pattern {shape.attention_pattern}: {reason}")
    return replace(config, attention_pattern=pattern)


def give_pattern(model: Transformer, shape: Shape) -> None:
    """Let a loaded model attend as the recipe's pattern says, where it has one; its config keeps it."""
    model.config = with_pattern(model.config, shape)
    for module in model.modules() if shape.attention_pattern is not None else ():
        if isinstance(module, Attention):
            module.take_pattern(model.config.attention_pattern)
            model.bound = False
