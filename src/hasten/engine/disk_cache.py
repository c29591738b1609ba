"""The prefix cache on disk: blocks of the cache are written behind, and read where that is faster than computing them.

A block is found by the same key in memory and on the disk. So the disk only ever fills free blocks of the cache in
memory, and sequences begin with them as with any other (`BlockManager.begin`).

Two threads do all that may wait for a disk (`hasten.engine.block_threads`). The beginning of the sequence whose turn it
is is read while those that run go on; the sequence begins when its blocks are there. Whether to read is decided by
measured times: bytes at the rate of the latest reads, beside tokens at the rate of the latest prompts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hasten.engine.block_files import VERSION, BlockFiles
from hasten.engine.block_threads import BlockLoad, BlockThreads, Rate
from hasten.engine.blocks import BlockManager
from hasten.engine.cache import KVCache
from hasten.engine.sequence import TextSequence
from hasten.errors import ConfigError
from hasten.machine.files import code_digest
from hasten.machine.processor import processor_name
from hasten.model.fingerprint import fingerprint
from hasten.model.fused import path_of
from hasten.model.transformer import Transformer
from hasten.ops.native import library

_USED_AGAIN = 60.0  # seconds after which a block that is used in memory is recorded as used on the disk, too
_MOST_FORGOTTEN = 10_000  # keys of blocks that memory no longer has
_TRY_AGAIN = 0.95  # what a decision against reading makes of the disk's measured time: rates change


@dataclass(slots=True, eq=False, kw_only=True)
class _SequenceLoad(BlockLoad):
    sequence: TextSequence


class DiskCache(BlockThreads):
    """The blocks of one engine on the disk. Its methods are called by the engine's thread."""

    def __init__(self, files: BlockFiles, cache: KVCache, blocks: BlockManager) -> None:
        super().__init__(files, cache, reach=blocks.reach)
        self.blocks = blocks
        self.prefill = Rate()
        self._load: _SequenceLoad | None = None

    def keep(self, filled: Sequence[tuple[bytes, int]]) -> None:
        """Queue copies of blocks that a step has filled, as many as the queue has room for.

        Blocks that were queued before are queued again: what a step computes could not be read.
        """
        taken = filled[: self.free_blocks]
        with self._work:
            self._stats.disk_dropped_blocks += len(filled) - len(taken)
        if taken:
            keys = [key for key, _ in taken]
            self._note(keys, time.monotonic())
            self.write_later(keys, [block for _, block in taken])

    def ready(self, sequence: TextSequence, keys: Callable[[], list[bytes]]) -> bool:
        """Whether a sequence may begin; False while blocks of its beginning are read.

        keys: finds those of the full blocks of its tokens. What was read is in the cache when this returns True.
        """
        if sequence.sought:
            return True
        load = self._load
        if load is not None and load.sequence is not sequence:
            self.let_go(load)
            load = None
        if load is None:
            load = self._load = self._begin(sequence, keys())
        found = self.read_by_all(load) if load.done.is_set() else None
        if found is None:
            return False
        self._load, sequence.sought = None, True
        self._take(load, found)
        self._used(load.keys)
        return True

    def give_up(self, sequence: TextSequence) -> None:
        """Stop reading for a sequence that ended before it began."""
        if self._load is not None and self._load.sequence is sequence:
            self.let_go(self._load)
            self._load = None

    def wait(self) -> None:
        """Wait a moment if a sequence's blocks are being read: for an engine that has nothing else to do."""
        if self._load is not None:
            self._load.done.wait(0.005)

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in what a step took; those that read prompts say how fast tokens are computed."""
        if tokens >= 2 * self.block_size:
            self.prefill.measured(tokens, seconds)

    def close(self) -> None:
        """Write what waits, end the threads, and let the cache go. May be called again."""
        self.blocks.on_filled = None
        if self._load is not None:
            self._load.given_up = True
        super().close()

    def _begin(self, sequence: TextSequence, keys: list[bytes]) -> _SequenceLoad:
        """Start reading a sequence's beginning; it is done at once where nothing is to be read."""
        in_memory = {key for key in keys if self.blocks.finds(key)}
        load = _SequenceLoad(keys, in_memory, self.blocks.free, sequence=sequence)
        missing = next((key for key in keys if key not in in_memory), None)
        none = sequence.private or missing is None or (self.blocks.reach is None and not self.files.has(missing))
        if none or not self._pays():
            load.done.set()
        else:
            self.read_soon(load)
        return load

    def _take(self, load: BlockLoad, found: Collection[bytes]) -> None:
        """Put the blocks that were read, those in `found`, into free blocks of the cache."""
        if not found:
            return
        adopted = self.blocks.adopt(load.keys, found)
        self.fill(load, adopted)
        self._note([key for key, _ in adopted], time.monotonic())
        self._stats.disk_hits += len(adopted) * self.block_size

    def read_by_all(self, load: BlockLoad) -> Collection[bytes] | None:
        """Keys of the blocks that every rank has read, once `load` is done here; None while another rank reads."""
        return {*load.found}

    def let_go(self, load: BlockLoad) -> None:
        """Stop reading blocks that no sequence waits for."""
        load.given_up = True

    def _used(self, keys: Sequence[bytes]) -> None:
        """Record that blocks are used in memory; those that are not on the disk are written."""
        now = time.monotonic()
        there = self.blocks.computed_blocks(keys)
        self.keep([(key, block) for key, block in there if key not in self._known])
        old = [key for key, _ in there if now - self._known.get(key, now) > _USED_AGAIN]
        if old:
            self._note(old, now)
            self.touch_later(old)

    def _note(self, keys: Sequence[bytes], now: float) -> None:
        """Remember that these blocks are on the disk, or will be; those that memory has not may be forgotten."""
        self._known.update(dict.fromkeys(keys, now))
        if len(self._known) > 2 * self.blocks.blocks + _MOST_FORGOTTEN:
            self._known = {key: then for key, then in self._known.copy().items() if self.blocks.finds(key)}

    def _pays(self) -> bool:
        """Whether reading a block is faster than computing it. Before both were measured, it is tried."""
        if self.reading.seconds is None or self.prefill.seconds is None:
            return True
        if self.block_bytes * self.reading.seconds < self.block_size * self.prefill.seconds:
            return True
        self.reading.seconds *= _TRY_AGAIN
        return False


def block_files(folder: Path, limit: int, model: Transformer, *, secret: bytes | None) -> BlockFiles:
    """The files of a model's blocks. Raises ConfigError where they cannot be kept, ResourceError for the folder."""
    reason = None
    if model.device.type != "cpu":
        reason = f"the model is on {model.device}; blocks are kept for models on a CPU only"
    elif secret is not None:
        reason = "several engines share the keys of their blocks (--replicas)"
    if reason is not None:
        raise ConfigError(f"prefix_cache={str(folder)!r}: {reason}; leave the folder out (True keeps blocks in memory)")
    return BlockFiles(folder.expanduser(), limit=limit)


def block_secret(files: BlockFiles, model: Transformer, cache: KVCache, *, adapters: Sequence[str]) -> bytes:
    """The secret of a model's keys: two engines have the same only if their blocks have the same bits.

    It derives from the folder's own, so that names say nothing of texts, and from all that a block depends on beside
    its tokens and its tenant: the weights, the config, the formats, the adapters by their names, the code, the
    processor and the kernels.
    """
    native = library()
    choice = model.adapters
    parts = (
        VERSION,
        code_digest(),
        torch.__version__,
        None if native is None else native.path.stem,
        path_of(model),
        None if model.stack is not None else torch.get_num_threads(),  # native steps give the same bits with any number
        processor_name(),  # PyTorch's products choose by it
        fingerprint(model),
        cache.kernel.name,
        cache.dtype,
        cache.row_format,
        cache.block_size,
        list(adapters),
        None if choice is None else choice.every,
    )
    return hashlib.blake2b(repr(parts).encode(), key=files.secret, digest_size=32).digest()
