"""Per-layer embeddings (Gemma 4): a second table gives each token an input of its own for every block.

A token's row of the table, and a product of its embedding, are added; a block multiplies its part by a gate that it
computes from the stream. A step reads one row of the table per token: most pages of a mapped one stay on disk.
B: sequences, T: tokens of each, C: hidden size, L: layers, P: features of a token for one layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hasten.model.activations import ACTIVATIONS
from hasten.model.config import ModelConfig
from hasten.model.mlp import Linear
from hasten.model.norms import norm_of
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.wide import wide_linear


class TokenFeatures(nn.Module):
    """What the tokens bring to each block."""

    embedding: nn.Embedding
    projection: Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers, self.size = len(config.layers), config.token_features
        width = self.layers * self.size
        self.embedding = nn.Embedding(config.token_vocab_size, width)
        self.projection = nn.Linear(config.hidden_size, width, bias=False)
        self.norm = norm_of(config, self.size)
        self.factor = config.hidden_size**-0.5

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Features (L, B, T, P) of tokens (B, T) and their embeddings x (B, T, C)."""
        wide = isinstance(self.projection, PackedLinear) and self.projection.request.dtype == torch.float32
        x = x.float() if wide else x  # of float16 weights, in a fused model
        return self._joined(self.embedding(tokens), self.projection(x)).movedim(-2, 0)

    def of_layer(self, layer: int, tokens: Tensor, x: Tensor) -> Tensor:
        """The features (B, T, P) of one layer, without the products of the others. The projection is not packed."""
        assert isinstance(self.projection, nn.Linear), "packed rows are not taken apart"
        own = slice(layer * self.size, (layer + 1) * self.size)
        seen = wide_linear(x, self.projection.weight[own], None)
        return self._joined(self.embedding(tokens)[..., own], seen).squeeze(-2)

    def _joined(self, own: Tensor, seen: Tensor) -> Tensor:
        """Rows of the table and products of the embedding, (…, k·P) of k layers each, as features (…, k, P)."""
        own = own * torch.tensor(self.size**0.5, dtype=self.embedding.weight.dtype)  # rounded, as Gemma was trained
        seen = self.norm((seen * self.factor).unflatten(-1, (-1, self.size)))
        return (seen + own.unflatten(-1, (-1, self.size)).to(seen.dtype)) * 2**-0.5


class TokenGate(nn.Module):
    """A block's use of its part: norm(expand(act(reduce x) · features)), which the block adds to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.token_features
        self.reduce: Linear = nn.Linear(hidden, size, bias=False)
        self.expand: Linear = nn.Linear(size, hidden, bias=False)
        self.norm = norm_of(config, hidden)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        """x (B, T, C), features (B, T, P) -> (B, T, C)."""
        return self.norm(self.expand(self.activation(self.reduce(x)) * features))
