"""Embeddings of texts: the model's last normalised states, pooled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.generation.ids import check_ids
from hasten.model.context import training_context
from hasten.model.transformer import Transformer
from hasten.serving.request import RequestRefused


@torch.no_grad()
def embed(model: Transformer, prompt: Sequence[int], *, pooling: str, max_length: int) -> Tensor:
    """States (C,) float32: the mean over the prompt's tokens ("mean"), or the last one's ("last"). Not normalised.

    Raises RequestRefused.
    """
    if pooling not in ("mean", "last"):
        raise RequestRefused(f"pooling is {pooling!r:.40}; it must be 'mean' or 'last'")
    try:
        check_ids(model, prompt)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    if not 0 < len(prompt) <= max_length:
        raise RequestRefused(f"the text has {len(prompt)} tokens; it must have from 1 to {max_length}")
    tokens = torch.tensor([list(prompt)], device=model.device)  # (1, T)
    positions = torch.arange(len(prompt), device=tokens.device)[None]
    x = model.norm(model.states(tokens, positions, training_context(model, len(prompt)))).float()[0]  # (T, C)
    return x[-1] if pooling == "last" else x.mean(dim=0)
