"""Two threads that move blocks of a cache to files and back, so that no step waits for a disk.

The writer takes copies of blocks from a queue of bounded size; what does not fit is not written. The reader reads the
blocks of a beginning. Which blocks these are is decided by the engine (`hasten.engine.disk_cache`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hasten.engine.block_files import HEADER_BYTES, BlockFiles
from hasten.engine.cache import KVCache
from hasten.engine.prefixes import passed_blocks, usable_blocks
from hasten.errors import ConfigError

_QUEUE_BYTES = 256 << 20  # of blocks that wait to be written
_PAUSE = 60.0  # seconds without writing after a write has failed
_AHEAD = 16  # files that the system is asked to read before they are wanted
_LATEST = 0.3  # weight of the latest measurement in a rate
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
class BlockLoad:
    """Blocks to read for a beginning. contents (n, block_bytes): of the keys in `found`, in this order."""

    keys: list[bytes]
    in_memory: set[bytes]
    most: int
    found: list[bytes] = field(default_factory=list)
    contents: Tensor | None = None
    given_up: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class BlockThreads:
    """The threads, and what is handed to them. reach: see `passed_blocks`. Raises ConfigError for too small a limit."""

    def __init__(self, files: BlockFiles, cache: KVCache, *, reach: int | None) -> None:
        self.files, self.cache, self.reach = files, cache, reach
        self.block_bytes, self.block_size = cache.block_bytes, cache.block_size
        if self.block_bytes + HEADER_BYTES > files.limit:
            raise ConfigError(
                f"prefix_cache_bytes is {files.limit:,}; one block of {cache.block_size} tokens takes "
                f"{self.block_bytes + HEADER_BYTES:,}: allow more"
            )
        self.reading = Rate()
        self._stats = DiskStats()
        self._known: dict[bytes, float] = {}  # when blocks were last queued to be written, or recorded as used
        self._paused_until = 0.0
        self._work = threading.Condition()  # what is below is shared with the threads
        self._to_write: deque[tuple[list[bytes], Tensor | None]] = deque()  # None: to be recorded as used
        self._waiting_bytes = 0
        self._to_read: deque[BlockLoad] = deque()
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

    # -- for the engine's thread --------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """How many further blocks can be queued to be written."""
        with self._work:
            if time.monotonic() < self._paused_until or self._closing:
                return 0
            return max(0, _QUEUE_BYTES - self._waiting_bytes) // self.block_bytes

    def write_later(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Queue copies of blocks of the cache. At most `free_blocks`."""
        contents = self.cache.read_blocks(blocks)
        with self._work:
            self._to_write.append((list(keys), contents))
            self._waiting_bytes += contents.nbytes
            self._work.notify_all()

    def touch_later(self, keys: Sequence[bytes]) -> None:
        """Queue that blocks are recorded as used."""
        with self._work:
            self._to_write.append((list(keys), None))
            self._work.notify_all()

    def read_soon(self, load: BlockLoad) -> None:
        """Have the reader read the blocks of a beginning; `load.done` is set when it has."""
        with self._work:
            self._to_read.append(load)
            self._work.notify_all()

    def fill(self, load: BlockLoad, adopted: Sequence[tuple[bytes, int]]) -> None:
        """Put blocks that were read into blocks of the cache: (key, block) each."""
        if load.contents is not None:
            rows = {key: row for row, key in enumerate(load.found)}
            contents = (load.contents[rows[key]] for key, _ in adopted)
            self.cache.write_blocks([block for _, block in adopted], contents)

    def flush(self, timeout: float = _CLOSING) -> None:
        """Wait until what was queued is written."""
        with self._work:
            self._work.wait_for(lambda: not self._waiting_bytes and not self._to_write, timeout)

    def close(self) -> None:
        """Write what waits, end the threads, and let the cache go. May be called again."""
        if self._closing:
            return
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

    def _read(self, load: BlockLoad) -> None:
        wanted = self._wanted(load)
        if not wanted:
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

    def _wanted(self, load: BlockLoad) -> list[bytes]:
        """The blocks to read: those that the sequence can begin with and that are not in memory."""
        size, reach = self.block_size, self.reach
        there = (key in load.in_memory or self.files.has(key) for key in load.keys)
        count = usable_blocks(there, block_size=size, reach=reach)
        first = passed_blocks(count * size, block_size=size, reach=reach)
        return [key for key in load.keys[first:count] if key not in load.in_memory][: load.most]
