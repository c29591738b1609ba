"""Snapshots of an engine for somebody who watches: who has which block, which sequences run, which kernels and why.

Snapshots are taken between two steps by the engine's own thread. Nothing is recorded while nobody watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hasten.machine.bandwidth import known_bandwidth
from hasten.machine.processor import processor_name
from hasten.model.binding import Binding, bytes_per_weight, explain
from hasten.model.sharded import ShardedTransformer
from hasten.planning.cost import decode_bytes_per_token

if TYPE_CHECKING:
    from hasten.engine.engine import Engine
    from hasten.engine.sequence import TextSequence

FREE, CACHED, FIRST_MARK = 0, 1, 2  # what a byte of a map says; larger ones are marks of sequences
_MARKS = 256 - FIRST_MARK


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSequence:
    """A running sequence: its number, its mark in the map, its tokens, and how many of them are in the cache."""

    number: int
    mark: int
    tokens: int
    computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The engine between two steps.

    marks: one byte a block, without the free blocks at the end; a shared block has the mark of its oldest sequence.
    shared: (block, sequences) of each block that several refer to. copied: blocks that were copied on a write since
    the snapshot before. step_bytes: bytes that a decode step of these sequences reads.
    """

    block_size: int
    blocks: int
    free: int
    marks: bytes
    shared: list[tuple[int, int]]
    copied: list[int]
    sequences: list[WatchedSequence]
    step_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedModel:
    """What stays the same while an engine is watched.

    machine: in words. bandwidth: bytes/s that its memory is known to reach, or None.
    """

    machine: str
    bandwidth: float | None
    kernels: list[Binding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """An engine that is watched. look: take a snapshot, between two steps."""

    model: WatchedModel
    look: Callable[[], Awaitable[Snapshot]]


class Watch:
    """Takes snapshots of an engine. Every method is called by the engine's thread, between steps.

    An engine has one watch at a time, which records the blocks that are copied until `end`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copied: list[int] = []
        self._weight_bytes = bytes_per_weight(engine.model)
        engine.on_copies = self._note_copies

    def end(self) -> None:
        """Record nothing any more."""
        if self._engine.on_copies == self._note_copies:  # not if another watch has begun
            self._engine.on_copies = None

    def model(self) -> WatchedModel:
        """The machine, and the kernels that the model runs on it."""
        model = self._engine.model
        alone = not isinstance(model, ShardedTransformer)  # what other ranks read is not counted here
        bandwidth = known_bandwidth(model.device) if alone else None
        return WatchedModel(machine=_machine(model.device), bandwidth=bandwidth, kernels=explain(model))

    def look(self) -> Snapshot:
        """The engine now."""
        blocks, running = self._engine.blocks, self._engine.scheduler.running
        self._copied, copied = [], self._copied
        tables = {sequence: blocks.table(sequence.number).own for sequence in running}
        marks = bytearray(blocks.blocks)
        for block in blocks.cached.values():
            marks[block] = CACHED
        for sequence, table in reversed(tables.items()):  # the oldest last, so that its mark stays
            mark = _mark(sequence)
            for block in table:
                marks[block] = mark
        shared: list[tuple[int, int]] = []
        if blocks.stats.shared_blocks:
            owners = Counter(block for table in tables.values() for block in table)
            shared = sorted((block, count) for block, count in owners.items() if count > 1)
        return Snapshot(
            block_size=blocks.block_size,
            blocks=blocks.blocks,
            free=blocks.free,
            marks=bytes(marks).rstrip(b"\0"),
            shared=shared,
            copied=copied,
            sequences=[
                WatchedSequence(number=one.number, mark=_mark(one), tokens=len(one.tokens), computed=one.computed)
                for one in running
            ],
            step_bytes=self._step_bytes(running),
        )

    def _note_copies(self, pairs: list[tuple[int, int]]) -> None:
        self._copied += [target for _, target in pairs]

    def _step_bytes(self, running: list[TextSequence]) -> float:
        """Bytes that a decode step of these sequences reads: the weights once, and the keys and values of each."""
        if not running:
            return 0.0
        engine, batch = self._engine, len(running)
        config, cache = engine.model.config, engine.runner.cache
        row = cache.row_format.bytes(config.head_dim, engine.model.compute_dtype) / config.head_dim
        context = sum(one.computed for one in running) // batch
        each = decode_bytes_per_token(
            config, weight_bytes=self._weight_bytes, kv_bytes=row, context=context, batch=batch
        )
        return batch * each


def _mark(sequence: TextSequence) -> int:
    """The byte that marks a sequence's blocks; sequences that run together hardly ever have the same."""
    return FIRST_MARK + sequence.number % _MARKS


def _machine(device: torch.device) -> str:
    """The processor that computes, in words."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' * (threads != 1)}"
