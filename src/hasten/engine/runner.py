"""What the model computes in a step, over its cache: logits for the tokens of all sequences, end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoints.adapters import place_adapter
from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.layout import RaggedLayout, to_device
from hasten.engine.prompts import check_ids
from hasten.engine.request import RequestRefused
from hasten.engine.sequence import ScheduledTokens
from hasten.engine.step import KVStep
from hasten.errors import ConfigError
from hasten.model.context import training_context
from hasten.model.experts import experts_of
from hasten.model.lora import Adapter
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

if TYPE_CHECKING:
    from hasten.engine.batch_runner import BatchRunner
    from hasten.engine.block_files import BlockFiles
    from hasten.engine.blocks import BlockManager
    from hasten.engine.disk_cache import DiskCache


class ModelRunner:
    """A model over its cache: what a step, or a text to embed, has it compute.

    (Others are in `engine/following.py` and `engine/side_by_side.py`.)
    decoder: runs decode steps as captured ones; None where nothing is captured, and `uncaptured` says why. max_length:
    tokens that a sequence may have. reach: keys that a query looks back to, at most; blocks before them are left.
    side_by_side: each sequence has one block, for all of its tokens. in_step: all ranks that hold the model have an
    engine, and their engines take the same steps. chooses_adapters: each sequence says which of the model's adapters it
    takes; False: the model's choice is left as it is. keeps_states: the next step's hidden states are wanted.
    last_states: those of the last step's tokens, (N, C) before the model's last norm, where they were.
    """

    decoder: BatchRunner | None = None
    uncaptured: str | None = None
    max_length: int
    side_by_side = False
    in_step = False
    chooses_adapters = True
    keeps_states = False
    last_states: Tensor | None = None

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.reach = model.config.reach
        self._latest: tuple[RaggedLayout, KVStep] | None = None
        # Whether a step's context reads its layout where it is, and so goes on with it.
        self._in_place = model.device.type == "cpu" and model.config.attention_pattern is None
        self._wanted: tuple[list[int], Tensor] | None = None
        self._next_tokens = np.empty(0, dtype=np.int64)
        self._next_ids = torch.from_numpy(self._next_tokens)[None]  # (1, N), the same memory

    def grow(self, blocks: int, max_length: int) -> None:
        """Have a cache of more blocks, over which nothing is captured yet."""
        if blocks > self.cache.blocks:
            self.cache.grow(blocks)
        self.max_length, self.decoder, self._latest = max_length, None, None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of the cache (source, target), as if one after the other."""
        self.cache.copy(pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy what layers keep of whole sequences, from one place to another (source, target), one after the other."""
        self.cache.copy_states(pairs)

    def logits(self, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> Tensor:
        """Logits (R, V) float32 of the wanted ones among the rows' tokens, which are laid end to end."""
        if self.decoder is not None and (found := self.decoder.prompts.logits(tokens, rows, wanted)) is not None:
            return found
        layout, device = RaggedLayout(rows, self.cache.block_size), self.model.device
        self._latest = layout, (step := self.cache.step_over(layout))
        if self._wanted is None or self._wanted[0] != wanted:
            self._wanted = list(wanted), to_device(list(wanted), device)
        return self._scores(to_device([list(tokens)], device), step, self._wanted[1])

    def _scores(self, ids: Tensor, step: KVStep, rows: Tensor | None) -> Tensor:
        """Logits (R, V) float32 of some rows of the step's tokens ids (1, N), or of all (1, N, V)."""
        if not self.keeps_states:
            logits: Tensor = self.model(ids, step.positions, step, rows=rows)
            return logits
        x = self.model.states(ids, step.positions, step)
        self.last_states = x[0]
        return self.model.scores(x if rows is None else x[0, rows])

    def can_go_on(self, entered: Sequence[tuple[int, int]]) -> bool:
        """Whether `next_logits` will."""
        return self._latest is not None and self._latest[0].has_columns(entered)

    def next_logits(self, tokens: Sequence[int], entered: Sequence[tuple[int, int]]) -> Tensor | None:
        """Logits (N, V) float32 after the next token of each of the N sequences of the last step, which had one each.

        entered: (sequence, block) for each that begins a block. None, and nothing is changed, where the step's block
        tables are too small: it has to be laid out again. The context of the last step is changed in place.
        """
        if self._latest is None:
            return None
        layout, step = self._latest
        if not layout.go_on(entered):
            return None
        if not self._in_place:
            self._latest = layout, (step := self.cache.step_over(layout))
        if len(self._next_tokens) != len(tokens):
            self._next_tokens = np.empty(len(tokens), dtype=np.int64)
            self._next_ids = torch.from_numpy(self._next_tokens)[None]
        self._next_tokens[:] = tokens
        ids = self._next_ids if self.cache.device.type == "cpu" else self._next_ids.to(self.cache.device)
        return self._scores(ids, step, None)[0]

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The last states (T, C) float32 of a text, normalised."""
        ids = torch.tensor([list(tokens)], device=self.model.device)  # (1, T)
        positions = torch.arange(len(tokens), device=ids.device)[None]
        context = training_context(self.model, len(tokens))
        return self.model.norm(self.model.states(ids, positions, context)).float()[0]

    def place_adapter(self, number: int, adapter: Adapter | None, folder: Path | None = None) -> None:
        """Put an adapter into a place of the model (`hasten.checkpoints.adapters.place_adapter`), between two steps.

        folder: where other ranks that hold the model read their shares of it. No text may use the place: where one rank
        cannot take the adapter, the others empty it.
        """
        place_adapter(self.model, number, adapter)

    def shared_secret(self, own: bytes) -> bytes:
        """The secret of the keys of blocks on the disk: this rank's own, and that of the others that hold the model."""
        return own

    def disk_cache(self, files: BlockFiles, blocks: BlockManager) -> DiskCache:
        """Start what keeps the cache's blocks on the disk."""
        from hasten.engine.disk_cache import DiskCache

        return DiskCache(files, self.cache, blocks)

    def close(self) -> None:
        """There will be no more steps."""


def step_logits(
    runner: ModelRunner, plan: Sequence[ScheduledTokens], *, captured: bool = True
) -> tuple[Tensor, list[int]]:
    """Logits (R, V) float32 of the rows that are wanted, and the first of each of the plan's entries.

    An entry's scored rows come before those of its last token. Where none is wanted, the step only reads, and R is 1.
    captured: whether a captured step may be looked for.
    """
    decoder = runner.decoder if captured else None
    if decoder is not None and (found := _captured_logits(decoder, plan)) is not None:
        return found
    tokens: list[int] = []
    wanted: list[int] = []
    first: list[int] = []
    for entry in plan:
        drafts, at = len(entry.sequence.drafts), len(tokens)
        tokens += entry.tokens
        first.append(len(wanted))
        if entry.sequence.scored:
            wanted += range(at, at + entry.scored)
        if entry.complete:
            wanted += range(len(tokens) - 1 - drafts, len(tokens))
    model = runner.model
    if model.adapters is not None and runner.chooses_adapters:
        chosen = [entry.sequence.adapter for entry in plan for _ in range(entry.count)]
        model.adapters.choose(chosen, model.device)
    return runner.logits(tokens, plan, wanted or [len(tokens) - 1]), first


def common_adapter(plan: Sequence[ScheduledTokens]) -> int | None:
    """The adapter that all of a plan's sequences take (-1: none does); None where they differ."""
    found = {entry.sequence.adapter for entry in plan}
    return found.pop() if len(found) == 1 else None


def _captured_logits(decoder: BatchRunner, plan: Sequence[ScheduledTokens]) -> tuple[Tensor, list[int]] | None:
    """The same of a step of decodes and their drafts, where it is captured."""
    for entry in plan:
        if not entry.complete or entry.count != 1 + len(entry.sequence.drafts):
            return None
    adapter = common_adapter(plan)
    return None if adapter is None else decoder.logits(plan, adapter=adapter)


@torch.no_grad()
def embed(runner: ModelRunner, prompt: Sequence[int], adapter: int = -1, *, pooling: str, max_length: int) -> Tensor:
    """States (C,) float32: the mean over the prompt's tokens ("mean"), or the last one's ("last"). Not normalised.

    Raises RequestRefused.
    """
    if pooling not in ("mean", "last"):
        raise RequestRefused(f"pooling is {pooling!r:.40}; it must be 'mean' or 'last'")
    try:
        check_ids(runner.model, prompt)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    if not 0 < len(prompt) <= max_length:
        raise RequestRefused(f"the text has {len(prompt)} tokens; it must have from 1 to {max_length}")
    model = runner.model
    if model.adapters is not None:
        model.adapters.choose([adapter] * len(prompt), model.device)
    x = runner.states(prompt)
    return x[-1] if pooling == "last" else x.mean(dim=0)


def capture_refusal(model: Transformer) -> str | None:
    """Why decode steps of this model are not captured, or None."""
    if isinstance(model, ShardedTransformer):
        return "several ranks hold the model, and the first one tells the others each step"
    if model.config.attention_pattern is not None:
        return "the masks of its sparse pattern are laid out on the host"
    for experts in filter(None, map(experts_of, model.blocks)):
        if (reason := experts.why_one_by_one()) is not None:
            return f"the host reads which of its experts to call: {reason}"
    if model.config.keeps_states:
        return "its layers keep states, whose places are listed on the host"
    if model.config.stretches_at is not None:
        return "longrope computes a sequence again where it outgrows the pretraining context"
    return None if model.device.type == "cuda" else f"CUDA graphs need a CUDA device; the model is on {model.device}"
