"""Who has which place among the states that layers keep: sequences, and snapshots for the prefix cache.

Keys and values of a beginning lie in its blocks; the state after it does not, and no other one leads to it. So a copy
of it is kept where a prompt's last full block ends, and now and then within long texts: a later text can begin with the
blocks before such a snapshot. Numbers only, as in `blocks`; `hasten.engine.cache.KVCache` has the tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.engine.block_table import SequenceBlocks

EVERY = 2048  # tokens of a text after which another snapshot is taken


class StateSlots:
    """Gives each sequence the lowest free place. Copies are asked for here, and made before the next step.

    snapshots: None where nothing can begin with the states of another sequence, or layers keep none.
    """

    def __init__(self, snapshots: StateSnapshots | None = None) -> None:
        self.snapshots = snapshots
        self._free: list[int] = []
        self._count = 0  # of places that sequences have, or gave back
        self.asked: list[tuple[int, int]] = []  # copies that are to be made

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many of the cached blocks with these keys, those of a beginning, a sequence can begin with."""
        return len(keys) if self.snapshots is None else self.snapshots.usable(keys)

    def begin(self, key: bytes | None = None) -> int:
        """Take a place for a sequence that begins with the blocks up to the one with this key, or with none."""
        own = heappop(self._free) if self._free else self._count
        self._count += own == self._count
        if key is not None and self.snapshots is not None:
            self.asked.append((self.snapshots.use(key), own))
        return own

    def fork(self, slot: int) -> int:
        """Take a place for a copy of a sequence's states."""
        own = self.begin()
        self.asked.append((slot, own))
        return own

    def end(self, slot: int) -> None:
        """Give back the place of a sequence that ends."""
        heappush(self._free, slot)

    def computed(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Take the snapshots that are due of sequences which a step has computed."""
        for own in sequences if self.snapshots is not None else ():
            if self.snapshots is not None and self.snapshots.due(own.held, mark=own.mark):
                place = self.snapshots.take(own.chain[-1])
                if place is not None:
                    self.asked.append((own.slot, place))

    def until_due(self, own: SequenceBlocks, first: int, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on are computed in a step that began at `first`: up to a snapshot."""
        if self.snapshots is None:
            return count
        return min(count, self.snapshots.next_due(first, mark=own.mark) - start)

    def copies(self) -> list[tuple[int, int]]:
        """The (source, target) places to copy before the next step, in this order; each is returned once."""
        found, self.asked = self.asked, []
        return found

    def forget(self) -> None:
        """Have no snapshots; running sequences keep their places."""
        if self.snapshots is not None:
            self.snapshots.forget()


class StateSnapshots:
    """Which places hold snapshots, by the keys of the blocks they follow.

    Places `first` … first + count - 1. Where all are taken, the one that was used longest ago makes way.
    """

    def __init__(self, *, first: int, count: int, block_size: int) -> None:
        self._free = list(range(first, first + count))
        self._held: OrderedDict[bytes, int] = OrderedDict()  # from the one used longest ago
        self._size, self._every = block_size, max(1, EVERY // block_size) * block_size

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks with these keys come before the last snapshot that is behind one of them."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._held), 0)

    def use(self, key: bytes) -> int:
        """The place of a snapshot that is there."""
        self._held.move_to_end(key)
        return self._held[key]

    def take(self, key: bytes) -> int | None:
        """A place for the snapshot behind a block; None where there is one already, or no place at all."""
        if key in self._held:
            self._held.move_to_end(key)
            return None
        if not self._free and not self._held:
            return None
        self._held[key] = place = self._free.pop() if self._free else self._held.popitem(last=False)[1]
        return place

    def forget(self) -> None:
        """Have none."""
        self._free += self._held.values()
        self._held.clear()

    def due(self, length: int, *, mark: int) -> bool:
        """Whether one is taken of a text of this length. mark: tokens of its prompt's full blocks."""
        return length > 0 and length % self._size == 0 and (length == mark or length % self._every == 0)

    def next_due(self, length: int, *, mark: int) -> int:
        """The next length above this one at which one is taken."""
        periodic = (length // self._every + 1) * self._every
        return min(periodic, mark) if mark > length else periodic
