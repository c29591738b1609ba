"""Runs steps of a model over its paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.layout import to_device
from hasten.model.context import training_context
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

if TYPE_CHECKING:
    from hasten.engine.batch_runner import BatchRunner


class ModelRunner:
    """A model over its cache: what a step, or a text to embed, has it compute.

    (Others are in `engine/following.py` and `engine/side_by_side.py`.)
    decoder: runs decode steps as captured ones; None where nothing is captured, and `uncaptured` says why. max_length:
    tokens that a sequence may have. reach: keys that a query looks back to, at most; blocks before them are left.
    side_by_side: each sequence has one block, for all of its tokens. in_step: all ranks that hold the model have an
    engine, and their engines take the same steps. chooses_adapters: each sequence says which of the model's adapters it
    takes; False: the model's choice is left as it is.
    """

    decoder: BatchRunner | None = None
    uncaptured: str | None = None
    max_length: int
    side_by_side = False
    in_step = False
    chooses_adapters = True

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.reach = model.config.reach
        self._wanted: tuple[list[int], Tensor] | None = None
        self._next_tokens = np.empty(0, dtype=np.int64)

    def grow(self, blocks: int, max_length: int) -> None:
        """Have a cache of more blocks, over which nothing is captured yet."""
        self.cache.grow(blocks)
        self.max_length, self.decoder = max_length, None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of the cache (source, target), as if one after the other."""
        self.cache.copy(pairs)

    def logits(self, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> Tensor:
        """Logits (R, V) float32 of the wanted ones among the rows' tokens, which are laid end to end."""
        if self.decoder is not None and (found := self.decoder.prompts.logits(tokens, rows, wanted)) is not None:
            return found
        step, device = self.cache.step(rows), self.model.device
        if self._wanted is None or self._wanted[0] != wanted:
            self._wanted = list(wanted), to_device(list(wanted), device)
        return self.model(to_device([list(tokens)], device), step.positions, step, rows=self._wanted[1])

    def next_logits(self, tokens: Sequence[int], entered: Sequence[tuple[int, int]]) -> Tensor | None:
        """Logits (N, V) float32 after the next token of each of the N sequences of the last step, which had one each.

        entered and None: as in `KVCache.go_on`.
        """
        step = self.cache.go_on(entered)
        if step is None:
            return None
        if len(self._next_tokens) != len(tokens):
            self._next_tokens = np.empty(len(tokens), dtype=np.int64)
        self._next_tokens[:] = tokens
        ids = torch.from_numpy(self._next_tokens)[None]  # (1, N)
        if self.cache.device.type != "cpu":
            ids = ids.to(self.cache.device)
        logits: Tensor = self.model(ids, step.positions, step)
        return logits[0]

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The last states (T, C) float32 of a text, normalised."""
        ids = torch.tensor([list(tokens)], device=self.model.device)  # (1, T)
        positions = torch.arange(len(tokens), device=ids.device)[None]
        context = training_context(self.model, len(tokens))
        return self.model.norm(self.model.states(ids, positions, context)).float()[0]

    def close(self) -> None:
        """There will be no more steps."""


def capture_refusal(model: Transformer) -> str | None:
    """Why decode steps of this model are not captured, or None."""
    if isinstance(model, ShardedTransformer):
        return "several ranks hold the model, and the first one tells the others each step"
    if model.config.attention_pattern is not None:
        return "the masks of its sparse pattern are laid out on the host"
    if any(layer.experts for layer in model.config.layers):
        return "its experts choose their tokens on the host"
    if model.config.stretches_at is not None:
        return "longrope computes a sequence again where it outgrows the pretraining context"
    return None if model.device.type == "cuda" else f"CUDA graphs need a CUDA device; the model is on {model.device}"
