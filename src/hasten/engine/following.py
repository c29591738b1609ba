"""Serving a model that several ranks hold: the first one has the engine, the others compute what it computes.

Everything that only one must decide (which requests, whose turn, which token) is decided there; before each step it
tells the others the tokens, and where their keys are kept.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.engine.admission import cache_blocks, longest, most_blocks, state_places
from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache, row_format
from hasten.engine.runner import ModelRunner, capture_refusal
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation import make_speculator
from hasten.errors import ConfigError
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

END, COPY, STEP, NEXT, STATES = range(5)  # what a message is


class LeadingRunner(ModelRunner):
    """The first rank's part of the model over its part of the cache; the others follow."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        super().__init__(model, cache)
        assert isinstance(model, ShardedTransformer)
        self.group = model.group
        if self.group.rank:
            raise ConfigError("the first rank has the engine; the others call hasten.engine.following.follow")
        self.group.of_first([cache.blocks])  # what the others make theirs of

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.group.of_first([COPY, *(block for pair in pairs for block in pair)])
        super().copy(pairs)

    def logits(self, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> Tensor:
        message = [STEP, *self._tokens(tokens), len(wanted), *wanted]
        for row in rows:
            message += [row.start, row.count, int(row.stretched), len(row.block_table), *row.block_table]
        self.group.of_first(message)
        return super().logits(tokens, rows, wanted)

    def next_logits(self, tokens: Sequence[int], entered: Sequence[tuple[int, int]]) -> Tensor | None:
        if not self.can_go_on(entered):
            return None
        self.group.of_first([NEXT, *self._tokens(tokens), 0, *(value for pair in entered for value in pair)])
        return super().next_logits(tokens, entered)

    def states(self, tokens: Sequence[int]) -> Tensor:
        self.group.of_first([STATES, *self._tokens(tokens), 0])
        return super().states(tokens)

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        """The tokens as a part of a message, and the adapter of each where any has one."""
        choice = self.model.adapters
        chosen: list[int] = [] if choice is None or choice.rows is None else choice.rows.tolist()
        return [len(tokens), *tokens, len(chosen), *chosen]

    def close(self) -> None:
        with suppress(RuntimeError):  # one of them has died: the others know
            self.group.of_first([END])


def runner_of(model: Transformer, settings: EngineSettings) -> ModelRunner:
    """What computes a server's steps, over a cache of the size in `settings`."""
    max_length = longest(model, settings)
    blocks = cache_blocks(model, settings, max_length=max_length)
    kind = LeadingRunner if isinstance(model, ShardedTransformer) else ModelRunner
    runner = kind(model, _cache(model, settings, blocks))
    runner.max_length = max_length
    capture_steps(runner, settings)
    if runner.uncaptured is not None and model.device.type == "cuda":
        logging.getLogger("hasten.engine").warning("decode steps are not captured: %s", runner.uncaptured)
    if settings.fit and most_blocks(model, settings, max_length) > blocks:
        runner.max_length = min(max_length, blocks * settings.block_size)
    return runner


def capture_steps(runner: ModelRunner, settings: EngineSettings) -> None:
    """Have a runner capture its steps where that is possible; its `uncaptured` says why they are not."""
    runner.uncaptured = "--no-capture" if not settings.capture else capture_refusal(runner.model)
    if runner.uncaptured is None:
        from hasten.engine.batch_runner import BatchRunner  # only here, and below: what runs on a CPU is there sooner

        most = {"sequences": settings.max_sequences, "longest": runner.max_length, "tokens": settings.budget}
        runner.decoder = BatchRunner(runner.model, runner.cache, **most, sizes=settings.capture_sizes or ())


def _cache(model: Transformer, settings: EngineSettings, blocks: int) -> KVCache:
    return KVCache(
        model.config,
        blocks=blocks,
        block_size=settings.block_size,
        dtype=model.compute_dtype,
        device=model.device,
        row_format=row_format(settings.kv_cache_dtype),
        sequences=state_places(settings),
    )


@torch.inference_mode()
def follow(
    model: ShardedTransformer,
    settings: EngineSettings,
    *,
    adapters: Mapping[str, str | Path] | None = None,
    draft: str | Path | Transformer = "none",
    **drafting: Any,
) -> None:
    """Compute what the first rank computes, until it ends: of an engine made with the same adapters and draft.

    RuntimeError where it has died.
    """
    if adapters:
        from hasten.checkpoints.adapters import load_adapters

        load_adapters(model, list(adapters.values()))
    make_speculator(model, draft, **drafting)  # refuses what the first rank refuses
    (blocks,) = model.group.of_first()
    runner = ModelRunner(model, _cache(model, settings, blocks))
    while True:
        kind, *message = model.group.of_first()
        rest = iter(message)
        if kind == END:
            return
        if kind == COPY:
            runner.copy(list(zip(rest, rest, strict=True)))
            continue
        tokens, chosen, wanted = _several(rest), _several(rest), _several(rest)
        if model.adapters is not None:
            model.adapters.choose(chosen or [-1], model.device)
        if kind == STATES:
            runner.states(tokens)
            continue
        if kind == NEXT:
            runner.next_logits(tokens, list(zip(rest, rest, strict=True)))
            continue
        rows = []
        for start in rest:
            count, stretched = next(rest), bool(next(rest))
            rows.append(Rows(_several(rest), start, count, stretched))
        runner.logits(tokens, rows, wanted)


def _several(message: Iterator[int]) -> list[int]:
    """The next numbers of a message, as many as the first one says."""
    return list(islice(message, next(message)))
