"""AdamW (arXiv 1711.05101) with weight decay on matrices only."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hasten.training.recipe import Optimizer


def parameter_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings (two dimensions or more) decay, norms and biases do not, as in nanoGPT."""
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """The optimizer of a model; one fused kernel updates all parameters of a group."""
    return torch.optim.AdamW(
        parameter_groups(model.parameters(), weight_decay=settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The same rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
