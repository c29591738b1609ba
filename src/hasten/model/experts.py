"""Mixture of experts: each token is sent to the few MLPs that a router scores highest (Switch, Mixtral)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hasten.model.config import ModelConfig


class Experts(nn.Module):
    """Top-k routing over `config.experts` gated MLPs; probabilities over all experts, in float32."""

    def __init__(self, config: ModelConfig, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.experts = nn.ModuleList(make() for _ in range(config.experts))
        self.top = config.experts_per_token
        self.normalize = config.normalize_experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # (N, C)
        probabilities = self.router(rows).float().softmax(dim=-1)  # (N, E)
        weights, chosen = probabilities.topk(self.top, dim=-1)  # (N, k) each
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            # Reading which rows chose this expert synchronises a GPU and breaks a compiled graph here; the expert
            # kernels that avoid both are still to come.
            row, slot = torch.where(chosen == index)
            if row.numel():
                out.index_add_(0, row, expert(rows[row]) * weights[row, slot, None].to(rows.dtype))
        return out.view_as(x)
