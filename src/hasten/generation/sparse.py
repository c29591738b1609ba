"""A sparse attention pattern over a cache: which of the kept keys the queries of a step see, layer by layer."""

import functools

import torch
from torch import Tensor

from hasten.model.config import ModelConfig
from hasten.ops.attention.block_mask import BlockMask, dense_blocks
from hasten.ops.attention.masks import visible
from hasten.ops.attention.pattern_layout import Pattern


class SparseMasks:
    """What a model's pattern shows at any position below `positions`.

    Held as one table a layer, bool (1 or H, blocks, blocks): a causal row stays what it is however long the text
    grows. Layers without random blocks share theirs.
    """

    def __init__(self, config: ModelConfig, *, positions: int, device: torch.device | str) -> None:
        assert config.attention_pattern is not None
        self.pattern: Pattern = config.attention_pattern
        self.positions, self.heads, self.count = positions, config.heads, len(config.layers)
        self.tables: list[Tensor] = []
        if self.pattern.period is not None:  # known of any two positions
            return
        blocks = -(-positions // self.pattern.block)
        drawn = getattr(self.pattern, "random_blocks", 0) > 0
        own = [
            _table(self.pattern, blocks, self.heads, layer).to(device) for layer in range(self.count if drawn else 1)
        ]
        self.tables = own if drawn else own * self.count

    def masks(self, positions: Tensor, places: Tensor) -> list[Tensor]:
        """For each layer, bool (B, T, S) or (B, H, T, S): what queries at positions (B, T) see of keys at places (S,).

        places may also be (B, S); a place below zero holds no key.
        """
        block, period = self.pattern.block, self.pattern.period
        earlier = visible(positions, places) & (places >= 0).unsqueeze(-2)  # (B, T, S)
        if period is not None:
            behind = (positions // block).unsqueeze(-1) - (places // block).unsqueeze(-2)
            return [earlier & (behind % period == 0)] * self.count
        made: dict[int, Tensor] = {}
        for table in self.tables:
            if id(table) not in made:
                rows = table[:, positions // block]  # (1 or H, B, T, blocks)
                columns = (places.clamp(min=0) // block).expand(earlier.shape[0], -1)[:, None].expand(earlier.shape)
                seen = rows.gather(-1, columns.expand(len(table), *earlier.shape)) & earlier
                made[id(table)] = seen[0] if len(table) == 1 else seen.transpose(0, 1)
        return [made[id(table)] for table in self.tables]

    def block_masks(self, tokens: int) -> list[BlockMask]:
        """For each layer, the mask of a text of so many tokens that begins at position 0."""
        return [_block_mask(self.pattern, tokens, heads=self.heads, layer=layer) for layer in range(self.count)]


@functools.lru_cache(maxsize=64)
def _table(pattern: Pattern, blocks: int, heads: int, layer: int) -> Tensor:
    return dense_blocks(pattern.layout(blocks, heads=heads, layer=layer))


_block_mask = functools.lru_cache(maxsize=64)(BlockMask.of)
