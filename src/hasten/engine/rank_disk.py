"""The prefix cache on disk of a model that several ranks hold: each rank keeps its part of every block.

The first rank decides which blocks are written and read, and tells the others. A block counts as read where every rank
has read its part; what only some have is computed, and written again. A sequence begins when all ranks are done; the
first asks before each step, and no step waits for the disk of another. The names of a rank's files are its own, so all
ranks may use one folder.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
import torch

from hasten.engine.block_files import BlockFiles
from hasten.engine.block_threads import BlockLoad, BlockThreads
from hasten.engine.blocks import BlockManager
from hasten.engine.cache import KVCache
from hasten.engine.disk_cache import DiskCache
from hasten.engine.rank_messages import DROP, KEEP, SEEK, TAKE, TOUCH
from hasten.ops.collective import RankGroup

_KEY_BYTES = 16  # two numbers of a message


def secret_of_ranks(group: RankGroup, own: bytes) -> bytes:
    """This rank's secret, which changes with that of any rank: each digests its own share of the model (32 bytes)."""
    bits = torch.frombuffer(bytearray(own), dtype=torch.float32)
    every = group.gather(bits, [len(bits)] * group.size).numpy().tobytes()
    return hashlib.blake2b(every + bytes([group.rank]), digest_size=32).digest()


class LeadingDisk(DiskCache):
    """The first rank's; the others have a `FollowingDisk`."""

    def __init__(self, files: BlockFiles, cache: KVCache, blocks: BlockManager, *, group: RankGroup) -> None:
        super().__init__(files, cache, blocks)
        self.group = group
        self._sought: BlockLoad | None = None  # what the other ranks read

    def write_later(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.group.of_first([KEEP, len(blocks), *blocks, *_numbers(keys)])
        super().write_later(keys, blocks)

    def touch_later(self, keys: Sequence[bytes]) -> None:
        self.group.of_first([TOUCH, *_numbers(keys)])
        super().touch_later(keys)

    def read_soon(self, load: BlockLoad) -> None:
        held = [int(key in load.in_memory) for key in load.keys]
        self.group.of_first([SEEK, load.most, len(held), *held, *_numbers(load.keys)])
        self._sought = load
        super().read_soon(load)

    def read_by_all(self, load: BlockLoad) -> Collection[bytes] | None:
        if load is not self._sought:
            return ()
        if not load.found:
            self.let_go(load)
            return ()
        self.group.of_first([TAKE])
        found = _read_by_all(self.group, load)
        if found is not None:
            self._sought = None
        return found

    def let_go(self, load: BlockLoad) -> None:
        super().let_go(load)
        if load is self._sought:
            self._sought = None
            with suppress(RuntimeError):  # a rank has died: the next step reports it
                self.group.of_first([DROP])

    def wait(self) -> None:
        if self._load is not None and self._load.done.wait(0.005):
            time.sleep(0.001)  # another rank still reads

    def fill(self, load: BlockLoad, adopted: Sequence[tuple[bytes, int]]) -> None:
        places = {key: place for place, key in enumerate(load.keys)}
        pairs = [number for key, block in adopted for number in (places[key], block)]
        self.group.of_first([len(adopted), *pairs])
        super().fill(load, adopted)


class FollowingDisk(BlockThreads):
    """Another rank's. Each method takes the rest of a message of the first rank."""

    def __init__(
        self, files: BlockFiles, cache: KVCache, *, reach: int | None, group: RankGroup, secret: bytes
    ) -> None:
        super().__init__(files, cache, reach=reach)
        self.group, self._secret = group, secret
        self._load: BlockLoad | None = None

    def keep(self, count: int, *rest: int) -> None:
        """Queue copies of blocks, as many as this rank's queue has room for."""
        taken = min(count, self.free_blocks)
        if taken:
            self.write_later(self._own(rest[count:])[:taken], rest[:taken])

    def touch(self, *keys: int) -> None:
        """Queue that blocks are recorded as used."""
        self.touch_later(self._own(keys))

    def seek(self, most: int, count: int, *rest: int) -> None:
        """Read the blocks of a beginning soon."""
        assert self._load is None, "what was sought before is taken or dropped first"
        keys = self._own(rest[count:])
        held = {key for key, there in zip(keys, rest[:count], strict=True) if there}
        self._load = BlockLoad(keys, held, most)
        self.read_soon(self._load)

    def take(self) -> None:
        """Put what every rank has read into the blocks that the first rank names; nothing while a rank still reads."""
        load = self._load
        assert load is not None, "nothing was sought"
        found = _read_by_all(self.group, load)
        if found is None:
            return
        self._load = None
        if found:
            _, *pairs = self.group.of_first()
            self.fill(load, [(load.keys[place], block) for place, block in zip(pairs[::2], pairs[1::2], strict=True)])

    def drop(self) -> None:
        """Stop reading, and release what was read."""
        assert self._load is not None, "nothing was sought"
        self._load.given_up, self._load = True, None

    def _own(self, numbers: Sequence[int]) -> list[bytes]:
        """This rank's names of the blocks whose keys are in a message."""
        packed = np.array(numbers, dtype=np.int64).tobytes()
        keys = (packed[at : at + _KEY_BYTES] for at in range(0, len(packed), _KEY_BYTES))
        return [hashlib.blake2b(key, key=self._secret, digest_size=_KEY_BYTES).digest() for key in keys]


def _numbers(keys: Sequence[bytes]) -> list[int]:
    """Keys as a part of a message."""
    return np.frombuffer(b"".join(keys), dtype=np.int64).tolist()


def _read_by_all(group: RankGroup, load: BlockLoad) -> set[bytes] | None:
    """Keys of the blocks of which every rank has read its part; None while a rank reads. All ranks call this."""
    found = set(load.found) if load.done.is_set() else None
    flags = [float(found is not None), *(float(found is not None and key in found) for key in load.keys)]
    done, *ranks = group.sum(torch.tensor(flags)).tolist()
    if done < group.size:
        return None
    return {key for key, count in zip(load.keys, ranks, strict=True) if count == group.size}
