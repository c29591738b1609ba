"""Serving a model that several ranks hold: the first one has the engine, the others compute what it computes.

Everything that only one must decide (which requests, whose turn, which token) is decided there; before each step it
tells the others the tokens, and where their keys are kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten.checkpoints.adapters import place_adapter, read_adapter
from hasten.engine.admission import cache_blocks, longest, most_blocks, state_places
from hasten.engine.block_table import Rows, SequenceBlocks
from hasten.engine.cache import KVCache, row_format
from hasten.engine.rank_messages import (
    ADAPTER,
    COPY,
    COPY_STATES,
    DROP,
    END,
    KEEP,
    NEXT,
    SECRET,
    SEEK,
    STATES,
    STEP,
    TAKE,
    TOUCH,
)
from hasten.engine.runner import ModelRunner, capture_refusal
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation import make_speculator
from hasten.errors import ConfigError, ResourceError
from hasten.model.lora import Adapter
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

if TYPE_CHECKING:
    from hasten.engine.block_files import BlockFiles
    from hasten.engine.blocks import BlockManager
    from hasten.engine.disk_cache import DiskCache
    from hasten.engine.rank_disk import FollowingDisk


class LeadingRunner(ModelRunner):
    """The first rank's part of the model over its part of the cache; the others follow."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        super().__init__(model, cache)
        assert isinstance(model, ShardedTransformer)
        self.group = model.group
        if self.group.rank:
            raise ConfigError("the first rank has the engine; the others call hasten.engine.following.follow")
        self.group.of_first([cache.blocks, cache.sequences])  # what the others make theirs of

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.group.of_first([COPY, *(block for pair in pairs for block in pair)])
        super().copy(pairs)

    def logits(self, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> Tensor:
        message = [STEP, *self._tokens(tokens), len(wanted), *wanted]
        for row in rows:
            message += [row.start, row.count, int(row.stretched), row.slot, row.guesses]
            message += [len(row.block_table), *row.block_table]
        self.group.of_first(message)
        return super().logits(tokens, rows, wanted)

    def next_logits(self, tokens: Sequence[int], entered: Sequence[tuple[int, int]]) -> Tensor | None:
        if not self.can_go_on(entered):
            return None
        self.group.of_first([NEXT, *self._tokens(tokens), 0, *(value for pair in entered for value in pair)])
        return super().next_logits(tokens, entered)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.group.of_first([COPY_STATES, *(place for pair in pairs for place in pair)])
        super().copy_states(pairs)

    def states(self, tokens: Sequence[int]) -> Tensor:
        self.group.of_first([STATES, *self._tokens(tokens), 0])
        return super().states(tokens)

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        """The tokens as a part of a message, and the adapter of each where any has one."""
        choice = self.model.adapters
        chosen: list[int] = [] if choice is None or choice.rows is None else choice.rows.tolist()
        return [len(tokens), *tokens, len(chosen), *chosen]

    def place_adapter(self, number: int, adapter: Adapter | None, folder: Path | None = None) -> None:
        assert adapter is None or folder is not None, "the other ranks read their shares of it"
        path = b"" if folder is None or adapter is None else os.fsencode(folder.absolute())
        self.group.of_first([ADAPTER, number, *path])
        error = _place_on_all(self.model, number, lambda: adapter)
        if error is not None:
            raise error

    def shared_secret(self, own: bytes) -> bytes:
        from hasten.engine.rank_disk import secret_of_ranks

        self.group.of_first([SECRET])
        return secret_of_ranks(self.group, own)

    def disk_cache(self, files: BlockFiles, blocks: BlockManager) -> DiskCache:
        from hasten.engine.rank_disk import LeadingDisk

        return LeadingDisk(files, self.cache, blocks, group=self.group)

    def close(self) -> None:
        with suppress(RuntimeError):  # one of them has died: the others know
            self.group.of_first([END])


def runner_of(model: Transformer, settings: EngineSettings, *, head_states: int = 0) -> ModelRunner:
    """What computes a server's steps, over a cache of the size in `settings`. head_states: as in `InferenceUse`."""
    max_length = longest(model, settings)
    blocks = cache_blocks(model, settings, max_length=max_length, head_states=head_states)
    kind = LeadingRunner if isinstance(model, ShardedTransformer) else ModelRunner
    runner = kind(model, _cache(model, settings, blocks, state_places(settings)))
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


def _cache(model: Transformer, settings: EngineSettings, blocks: int, sequences: int) -> KVCache:
    return KVCache(
        model.config,
        blocks=blocks,
        block_size=settings.block_size,
        dtype=model.compute_dtype,
        device=model.device,
        row_format=row_format(settings.kv_cache_dtype),
        sequences=sequences,
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
    runner = ModelRunner(model, _cache(model, settings, *model.group.of_first()))
    disk: FollowingDisk | None = None
    while True:
        kind, *message = model.group.of_first()
        rest = iter(message)
        if kind == END:
            if disk is not None:
                disk.close()
            return
        if kind == SECRET:
            disk = _disk(runner, settings, list(adapters or ()))
            continue
        if kind in (COPY, COPY_STATES):
            copy = runner.copy if kind == COPY else runner.copy_states
            copy(list(zip(rest, rest, strict=True)))
            continue
        if kind == ADAPTER:  # the first rank reports what fails
            number, *path = message
            _place_on_all(model, number, partial(_adapter_in, model, bytes(path)))
            continue
        if disk is not None and kind in (KEEP, TOUCH, SEEK, TAKE, DROP):
            own: dict[int, Any] = {
                KEEP: disk.keep,
                TOUCH: disk.touch,
                SEEK: disk.seek,
                TAKE: disk.take,
                DROP: disk.drop,
            }
            own[kind](*message)
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
            count, stretched, slot, guesses = islice(rest, 4)
            table: Any = _several(rest)
            if model.config.keeps_states:
                table = SequenceBlocks(table, [], start, start, 0, slot=slot)
            rows.append(Rows(table, start, count, bool(stretched), guesses=guesses))
        runner.logits(tokens, rows, wanted)


def _place_on_all(model: Transformer, number: int, read: Callable[[], Adapter | None]) -> Exception | None:
    """Place this rank's share of an adapter; where one rank cannot, none has it. Returns why. All ranks call this."""
    assert isinstance(model, ShardedTransformer)
    group = model.group
    error: Exception | None = None
    try:
        place_adapter(model, number, read())
    except Exception as found:  # whatever it was, the others wait
        error = found
    failed = group.gather(torch.tensor([float(error is not None)]), [1] * group.size)
    if error is None and failed.any():
        with suppress(ResourceError):
            place_adapter(model, number, None)
        ranks = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
        return ResourceError(
            f"rank {ranks} cannot take the adapter: it reads its share of the same folder, and needs memory for it; "
            "unload another adapter, or look at the folder on its machine"
        )
    return error


def _adapter_in(model: Transformer, path: bytes) -> Adapter | None:
    """This rank's share of the adapter in a folder; None without one."""
    return read_adapter(model, Path(os.fsdecode(path))) if path else None


def _disk(runner: ModelRunner, settings: EngineSettings, adapters: Sequence[str]) -> FollowingDisk:
    """This rank's part of the prefix cache on disk."""
    from hasten.engine.disk_cache import block_files, block_secret
    from hasten.engine.rank_disk import FollowingDisk, secret_of_ranks

    folder, model = settings.prefix_cache, runner.model
    assert isinstance(model, ShardedTransformer)
    if not isinstance(folder, str | Path):
        raise ConfigError(f"the first rank has prefix_cache=FOLDER, rank {model.group.rank} {folder}; give it to all")
    files = block_files(Path(folder), settings.prefix_cache_bytes, model, secret=None)
    own = block_secret(files, model, runner.cache, adapters=adapters)
    secret = secret_of_ranks(model.group, own)
    return FollowingDisk(files, runner.cache, reach=runner.reach, group=model.group, secret=secret)


def _several(message: Iterator[int]) -> list[int]:
    """The next numbers of a message, as many as the first one says."""
    return list(islice(message, next(message)))
