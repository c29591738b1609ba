"""A sparse attention pattern over a cache: which of the kept keys the queries of a step see, layer by layer."""

import functools

import torch
from torch import Tensor

from hasten.model.config import ModelConfig
from hasten.ops.attention.block_mask import BlockMask, seen_blocks
from hasten.ops.attention.inputs import visible
from hasten.ops.attention.pattern_layout import Pattern
from hasten.ops.native import native_ops


class SparseMasks:
    """What a model's pattern shows at any position below `positions`.

    Held as one table a layer (`seen_blocks`): a causal row stays what it is however long the text grows. Layers without
    random blocks share theirs.
    """

    def __init__(self, config: ModelConfig, *, positions: int, device: torch.device | str) -> None:
        assert config.attention_pattern is not None
        self.pattern: Pattern = config.attention_pattern
        self.positions, self.heads, self.count = positions, config.heads, len(config.layers)
        reach = self.pattern.reach
        windows = [layer.window for layer in config.layers]
        # How far back each layer looks: as the pattern does, and no further than its own window.
        self.reaches = [min(filter(None, (reach, window)), default=None) for window in windows]
        self.windows = windows
        blocks = 0 if self.pattern.cycle is not None else -(-positions // self.pattern.block)
        drawn = getattr(self.pattern, "random_blocks", 0) > 0
        layers = range(self.count if drawn else 1)
        own = [_seen(self.pattern, blocks, heads=self.heads, layer=layer).to(device) for layer in layers]
        self.tables: list[Tensor] = own if drawn else own * self.count

    def masks(self, positions: Tensor, places: Tensor) -> list[Tensor]:
        """For each layer, bool (B, T, S) or (B, H, T, S): what queries at positions (B, T) see of keys at places (S,).

        places may also be (B, S); a place below zero holds no key.
        """
        block, held = self.pattern.block, (places >= 0).unsqueeze(-2)
        made: dict[tuple[int, int | None], Tensor] = {}
        for table, reach in zip(self.tables, self.reaches, strict=True):
            if (id(table), reach) not in made:
                near = visible(positions, places, reach) & held  # (B, T, S)
                heads, height, width = table.shape
                rows = table[:, positions // block % height]  # (1 or H, B, T, width)
                columns = (places.clamp(min=0) // block % width).expand(near.shape[0], -1)[:, None].expand(near.shape)
                seen = rows.gather(-1, columns.expand(heads, *near.shape)) & near
                made[id(table), reach] = seen[0] if heads == 1 else seen.transpose(0, 1)
        return [made[id(table), reach] for table, reach in zip(self.tables, self.reaches, strict=True)]

    @functools.cached_property
    def native(self) -> list[Tensor]:
        """For each layer, what the native kernels over a cache take."""
        plan = native_ops().plan_pattern
        own = [(id(table), reach) for table, reach in zip(self.tables, self.reaches, strict=True)]
        made = {key: plan(table, self.pattern.block, key[1] or 0) for key, table in zip(own, self.tables, strict=True)}
        return [made[key] for key in own]

    def block_masks(self, tokens: int) -> list[BlockMask]:
        """For each layer, the mask of a text of `tokens` tokens that begins at position 0."""
        pattern, heads = self.pattern, self.heads
        own = enumerate(self.windows)
        return [_block_mask(pattern, tokens, heads=heads, layer=layer, window=window) for layer, window in own]


_seen = functools.lru_cache(maxsize=64)(seen_blocks)
_block_mask = functools.lru_cache(maxsize=64)(BlockMask.of)
