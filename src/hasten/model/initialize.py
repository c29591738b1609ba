"""Random weights for a model that is trained from scratch, or measured without a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hasten.model.config import ModelConfig
from hasten.model.delta import GatedDeltaNet
from hasten.model.experts import kept_dtype
from hasten.model.norms import LayerNorm, RMSNorm
from hasten.model.transformer import Transformer


def initialize(
    config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """Create a model with GPT-2's initialization: normal(0, 0.02), times 1/√(2·layers) in residual projections.

    Reproducible from the seed on one device. Rows that pad the vocabulary are zero.
    """
    with unfilled():
        model = Transformer(config)
    for module in model.modules():
        for name, empty in module.named_parameters(recurse=False):
            own = kept_dtype(f".{name}", dtype)
            setattr(module, name, nn.Parameter(torch.empty(empty.shape, dtype=own, device=device)))
    model.to(device)  # the rotary tables
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    generator = torch.Generator(device=device).manual_seed(seed)
    std = config.initializer_range
    residual = std / (2 * len(config.layers)) ** 0.5
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith((".output", ".down", ".out"))
                module.weight.normal_(0.0, residual if into_residual else std, generator=generator)
            elif isinstance(module, RMSNorm | LayerNorm):
                module.weight.fill_(1.0 - module.offset)
            elif isinstance(module, GatedDeltaNet):
                module.fill(generator)
            if isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
                sinks.normal_(0.0, std, generator=generator)
            for bias in (getattr(module, "bias", None), getattr(module, "choice_bias", None)):
                if isinstance(bias, nn.Parameter):
                    bias.zero_()
        for padded in (model.embedding.weight, model.head.weight):
            padded[config.vocab_size :] = 0
    model.bind()
    return model


@contextmanager
def unfilled() -> Iterator[None]:
    """Create modules on the meta device, without initializing their parameters."""
    with torch.device("meta"), _Uninitialised():
        yield


class _Uninitialised(TorchFunctionMode):
    """Leaves new parameters as they are.

    The meta device has no data to fill, and the first random number drawn there imports torch's symbolic shapes: 155 MB
    and over a second at the start of a process (measured).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
