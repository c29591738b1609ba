"""The prefix cache on disk: blocks of the cache are written behind, and read where that is faster than computing them.

A block is found by the same key in memory and on the disk. So the disk only ever fills free blocks of the cache in
memory, and sequences begin with them as with any other (`BlockManager.begin`).

Two threads of its own do all that may wait for a disk. The writer takes copies of blocks that steps have filled, from a
queue of bounded size; what does not fit is not written. The reader loads the beginning of the sequence whose turn it
is, while those that run go on; the sequence begins when its blocks are there. Whether to read is decided by measured
times: bytes at the rate of the latest reads, beside tokens at the rate of the latest prompts.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from hasten.engine.block_files import HEADER_BYTES, VERSION, BlockFiles
from hasten.engine.blocks import BlockManager
from hasten.engine.cache import KVCache
from hasten.engine.prefixes import passed_blocks, usable_blocks
from hasten.engine.sequence import TextSequence
from hasten.errors import ConfigError
from hasten.machine.files import code_digest
from hasten.machine.processor import processor_name
from hasten.model.fingerprint import fingerprint
from hasten.model.fused import path_of
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer
from hasten.ops.native import library

_QUEUE_BYTES = 256 << 20  # of blocks that wait to be written
_PAUSE = 60.0  # seconds without writing after a write has failed
_USED_AGAIN = 60.0  # seconds after which a block that is used in memory is recorded as used on the disk, too
_AHEAD = 16  # files that the system is asked to read before they are wanted
_MOST_FORGOTTEN = 10_000  # keys of blocks that memory no longer has
_LATEST = 0.3  # weight of the latest measurement in a rate
_TRY_AGAIN = 0.95  # what a decision against reading makes of the disk's measured time: rates change
_CLOSING = 30.0  # seconds in which what waits is written when the engine is closed


@dataclass(slots=True)
class DiskStats:
    """disk_hits: tokens whose blocks were read; disk_seconds: what reading took. Blocks that were dropped were not
    written: the queue was full, or the disk."""

    disk_hits: int = 0
    disk_seconds: float = 0.0
    disk_written_blocks: int = 0
    disk_dropped_blocks: int = 0


@dataclass(slots=True)
class Rate:
    """Seconds of one unit (a byte, a token), by the latest measurements; None before the first."""

    seconds: float | None = None

    def measured(self, units: int, seconds: float) -> None:
        """Take one measurement in."""
        new = seconds / units
        self.seconds = new if self.seconds is None else self.seconds + _LATEST * (new - self.seconds)


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks to read for a sequence. contents (n, block_bytes): of the keys in `found`, in this order."""

    sequence: TextSequence
    keys: list[bytes]
    in_memory: set[bytes]
    most: int
    found: list[bytes] = field(default_factory=list)
    contents: Tensor | None = None
    given_up: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class DiskCache:
    """The blocks of one engine on the disk. Its methods are called by the engine's thread."""

    def __init__(self, files: BlockFiles, cache: KVCache, blocks: BlockManager) -> None:
        self.files, self.cache, self.blocks = files, cache, blocks
        self.block_bytes, self.block_size = cache.block_bytes, cache.block_size
        if self.block_bytes + HEADER_BYTES > files.limit:
            raise ConfigError(
                f"prefix_cache_bytes is {files.limit:,}; one block of {cache.block_size} tokens takes "
                f"{self.block_bytes + HEADER_BYTES:,}: allow more"
            )
        self.reading, self.prefill = Rate(), Rate()
        self._stats = DiskStats()
        self._known: dict[bytes, float] = {}  # when blocks were last queued to be written, or recorded as used
        self._load: _Load | None = None
        self._paused_until = 0.0
        self._work = threading.Condition()  # what is below is shared with the threads
        self._to_write: deque[tuple[list[bytes], Tensor | None]] = deque()  # None: to be recorded as used
        self._waiting_bytes = 0
        self._to_read: deque[_Load] = deque()
        self._closing = False
        self._threads = [
            threading.Thread(target=run, name=f"hasten-disk-{name}", daemon=True)
            for name, run in (("writer", self._write_behind), ("reader", self._read_loads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> DiskStats:
        return replace(self._stats)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def keep(self, filled: Sequence[tuple[bytes, int]]) -> None:
        """Queue copies of blocks that a step has filled, as many as the queue has room for.

        Blocks that were queued before are queued again: what a step computes could not be read.
        """
        now = time.monotonic()
        with self._work:
            free = max(0, _QUEUE_BYTES - self._waiting_bytes) // self.block_bytes
            taken = filled[: 0 if now < self._paused_until or self._closing else free]
            self._stats.disk_dropped_blocks += len(filled) - len(taken)
        if not taken:
            return
        contents = self.cache.read_blocks([block for _, block in taken])
        keys = [key for key, _ in taken]
        self._note(keys, now)
        with self._work:
            self._to_write.append((keys, contents))
            self._waiting_bytes += contents.nbytes
            self._work.notify_all()

    def ready(self, sequence: TextSequence, keys: Callable[[], list[bytes]]) -> bool:
        """Whether a sequence may begin; False while blocks of its beginning are read.

        keys: finds those of the full blocks of its tokens. What was read is in the cache when this returns True.
        """
        if sequence.sought:
            return True
        load = self._load
        if load is not None and load.sequence is not sequence:
            load.given_up, load = True, None
        if load is None:
            load = self._load = self._begin(sequence, keys())
        if not load.done.is_set():
            return False
        self._load, sequence.sought = None, True
        self._take(load)
        self._used(load.keys)
        return True

    def give_up(self, sequence: TextSequence) -> None:
        """Stop reading for a sequence that ended before it began."""
        if self._load is not None and self._load.sequence is sequence:
            self._load.given_up, self._load = True, None

    def wait(self) -> None:
        """Wait a moment if a sequence's blocks are being read: for an engine that has nothing else to do."""
        if self._load is not None:
            self._load.done.wait(0.005)

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in what a step took; those that read prompts say how fast tokens are computed."""
        if tokens >= 2 * self.block_size:
            self.prefill.measured(tokens, seconds)

    def flush(self, timeout: float = _CLOSING) -> None:
        """Wait until what was queued is written."""
        with self._work:
            self._work.wait_for(lambda: not self._waiting_bytes and not self._to_write, timeout)

    def close(self) -> None:
        """Write what waits, end the threads, and let the cache go. May be called again."""
        if self._closing:
            return
        self.blocks.on_filled = None
        if self._load is not None:
            self._load.given_up = True
        own = threading.current_thread() in self._threads  # where the collector found a forgotten engine
        if not own:
            self.flush()
        with self._work:
            self._closing = True
            self._to_write.clear()
            self._work.notify_all()
        for thread in () if own else self._threads:
            thread.join(_CLOSING)
        del self.cache

    def _begin(self, sequence: TextSequence, keys: list[bytes]) -> _Load:
        """Start reading a sequence's beginning; it is done at once where there is nothing to read."""
        in_memory = {key for key in keys if self.blocks.finds(key)}
        load = _Load(sequence, keys, in_memory, most=self.blocks.free)
        missing = next((key for key in keys if key not in in_memory), None)
        if sequence.private or missing is None or (self.blocks.reach is None and not self.files.has(missing)):
            load.done.set()
            return load
        with self._work:
            self._to_read.append(load)
            self._work.notify_all()
        return load

    def _take(self, load: _Load) -> None:
        """Put the blocks that were read into free blocks of the cache."""
        if load.contents is None or not load.found:
            return
        rows = {key: row for row, key in enumerate(load.found)}
        adopted = self.blocks.adopt(load.keys, rows)
        contents = (load.contents[rows[key]] for key, _ in adopted)
        self.cache.write_blocks([block for _, block in adopted], contents)
        self._note([key for key, _ in adopted], time.monotonic())
        self._stats.disk_hits += len(adopted) * self.block_size

    def _used(self, keys: Sequence[bytes]) -> None:
        """Record that blocks are used in memory; those that are not on the disk are written."""
        now = time.monotonic()
        there = self.blocks.computed_blocks(keys)
        self.keep([(key, block) for key, block in there if key not in self._known])
        old = [key for key, _ in there if now - self._known.get(key, now) > _USED_AGAIN]
        if old:
            self._note(old, now)
            with self._work:
                self._to_write.append((old, None))
                self._work.notify_all()

    def _note(self, keys: Sequence[bytes], now: float) -> None:
        """Remember that these blocks are on the disk, or will be; those that memory has not may be forgotten."""
        self._known.update(dict.fromkeys(keys, now))
        if len(self._known) > 2 * self.blocks.blocks + _MOST_FORGOTTEN:
            self._known = {key: then for key, then in self._known.copy().items() if self.blocks.finds(key)}

    # -- the writer ---------------------------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Write what was queued first, and let its copy go; False when nothing will come."""
        with self._work:
            self._work.wait_for(lambda: self._to_write or self._closing)
            if not self._to_write:
                return False
            keys, contents = self._to_write[0]
        if contents is None:
            self._forget(self.files.touch(keys))
        else:
            self._write(keys, contents)
        with self._work:
            if self._to_write:
                self._to_write.popleft()
            self._waiting_bytes -= 0 if contents is None else contents.nbytes
            self._work.notify_all()
        return True

    def _write(self, keys: Sequence[bytes], contents: Tensor) -> None:
        done = written = 0
        try:
            for key, block in zip(keys, contents.numpy(), strict=True):
                if time.monotonic() < self._paused_until:
                    break
                written += self.files.write(key, memoryview(block))
                done += 1
        except Exception as error:  # whatever it was: the queue must go on
            self._paused_until = time.monotonic() + _PAUSE
            reason = getattr(error, "strerror", None) or str(error)
            self.files.warn(
                "write", f"{self.files.folder} cannot be written ({reason}); no blocks are added for a while"
            )
        self.files.touch(keys[:done])
        with self._work:
            self._stats.disk_written_blocks += written
            self._stats.disk_dropped_blocks += len(keys) - done
        self._forget(keys[done:])

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are not on the disk, so that they are written when they are used again."""
        for key in keys:
            self._known.pop(key, None)

    # -- the reader ---------------------------------------------------------------------------------------------------

    def _read_loads(self) -> None:
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        """Read the blocks that were asked for first, and let them go; False when the engine is closed."""
        with self._work:
            self._work.wait_for(lambda: self._to_read or self._closing)
            if self._closing:
                return False
            load = self._to_read.popleft()
        try:
            self._read(load)
        except Exception as error:  # no memory for the blocks, or whatever it was: nobody may wait for ever
            load.found.clear()
            self.files.warn("reader", f"blocks are computed instead of read: {error}")
        finally:
            load.done.set()
        return True

    def _read(self, load: _Load) -> None:
        wanted = self._wanted(load)
        if not wanted or not self._pays(len(wanted)):
            return
        started = time.perf_counter()
        load.contents = torch.empty(len(wanted), self.block_bytes, dtype=torch.uint8)
        rows = load.contents.numpy()
        for row, key in enumerate(wanted):
            for soon in wanted[: _AHEAD + 1] if not row else wanted[row + _AHEAD : row + _AHEAD + 1]:
                self.files.read_ahead(soon)
            if load.given_up:
                return
            if not self.files.read(key, memoryview(rows[row])):
                self._forget([key])
                break
            load.found.append(key)
        self.files.touch(load.found)
        seconds = time.perf_counter() - started
        self._stats.disk_seconds += seconds
        if load.found:
            self.reading.measured(len(load.found) * self.block_bytes, seconds)

    def _wanted(self, load: _Load) -> list[bytes]:
        """The blocks to read: those that the sequence can begin with and that are not in memory."""
        size, reach = self.block_size, self.blocks.reach
        there = (key in load.in_memory or self.files.has(key) for key in load.keys)
        count = usable_blocks(there, block_size=size, reach=reach)
        first = passed_blocks(count * size, block_size=size, reach=reach)
        return [key for key in load.keys[first:count] if key not in load.in_memory][: load.most]

    def _pays(self, blocks: int) -> bool:
        """Whether reading blocks is faster than computing them. Before both were measured, it is tried."""
        if self.reading.seconds is None or self.prefill.seconds is None:
            return True
        read = blocks * self.block_bytes * self.reading.seconds
        if read < blocks * self.block_size * self.prefill.seconds:
            return True
        self.reading.seconds *= _TRY_AGAIN
        return False


def block_files(folder: Path, limit: int, model: Transformer, *, secret: bytes | None) -> BlockFiles:
    """The files of a model's blocks. Raises ConfigError where they cannot be kept, ResourceError for the folder."""
    reason = None
    if model.device.type != "cpu":
        reason = f"the model is on {model.device}; blocks are kept for models on a CPU only"
    elif isinstance(model, ShardedTransformer):
        reason = "several ranks hold the model, each a part of every block"
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
