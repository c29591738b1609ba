"""Random weights for a model that is trained from scratch, or measured without a checkpoint."""

import torch
from torch import nn

from hasten.model.config import ModelConfig
from hasten.model.norms import LayerNorm, RMSNorm
from hasten.model.transformer import Transformer


def initialize(
    config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """A model with GPT-2's initialisation: normal(0, 0.02), what is added to the residual stream 1/√(2·layers) of it.

    Reproducible from the seed on one device. Rows that pad the vocabulary are zero.
    """
    with torch.device("meta"):
        model = Transformer(config)
    model.to(dtype)
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    generator = torch.Generator(device=device).manual_seed(seed)
    std = config.initializer_range
    residual = std / (2 * len(config.layers)) ** 0.5
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith((".output", ".down"))
                module.weight.normal_(0.0, residual if into_residual else std, generator=generator)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0 - module.offset)
            elif isinstance(module, LayerNorm):
                module.weight.fill_(1.0)
            bias = getattr(module, "bias", None)
            if isinstance(bias, nn.Parameter):
                bias.zero_()
        for padded in (model.embedding.weight, model.head.weight):
            padded[config.vocab_size :] = 0
    model.bind()
    return model
