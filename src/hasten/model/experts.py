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

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for rows (N, C): their shares of a row's output, float32, and their numbers, (N, k) each."""
        probabilities = self.router(rows).float().softmax(dim=-1)  # (N, E)
        shares, chosen = probabilities.topk(self.top, dim=-1)
        if self.normalize:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # (N, C)
        shares, chosen = self.route(rows)
        out = torch.zeros_like(rows)
        # Reading which experts are chosen synchronises a GPU and breaks a compiled graph here; a GPU's expert kernels,
        # which avoid both, are still to come.
        for index in chosen.unique().tolist():
            row, slot = torch.where(chosen == index)
            out.index_add_(0, row, self.experts[index](rows[row]) * shares[row, slot, None].to(rows.dtype))
        return out.view_as(x)
