"""Who owns which block of the paged cache: tables, sharing, copy on write, and the cache of prefixes.

The keys and values of a sequence lie in blocks of a fixed number of tokens, in any order; a table a sequence lists them
(PagedAttention, arXiv 2309.06180). A fork shares every block of its parent; the first write to a block that several
sequences refer to copies that block only. Full blocks stay findable by their tokens after everybody has left them, so
that a later request with the same beginning adopts them, until their room is needed.

Only numbers are kept here; the tensors are `hasten.engine.cache.KVCache`. Every operation either succeeds or
raises and changes nothing.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from hasten.engine.block_table import BlockStats, SequenceBlocks
from hasten.engine.prefixes import next_key, passed_blocks, prefix_keys, usable_blocks
from hasten.engine.state_slots import StateSlots, StateSnapshots
from hasten.errors import ConfigError, ResourceError


class OutOfBlocks(ResourceError):
    """The cache has fewer free blocks than were asked for. Nothing was changed."""


def blocks_of(tokens: int, block_size: int, *, reach: int | None, step: int) -> int:
    """Blocks that a sequence of `tokens` tokens has at once, at most, with steps of `step` tokens.

    reach: how many keys back a query looks, None: all.
    """
    blocks = -(-tokens // block_size)
    return blocks if reach is None else min(blocks, -(-(reach + step) // block_size) + 1)


class BlockManager:
    """Blocks 0 … blocks - 1 of `block_size` tokens each. Sequences are numbers of the caller's choice.

    The order of calls for a step: `reserve` room for its tokens, make the copies it returns, tell by `written` which
    tokens they are, run the step, say `computed`. What `written` was given must be computed in that step, because
    others may have adopted the blocks; after a step that failed, `release` its sequences and `forget`.
    `fork` and `truncate` are called between steps, and are refused (AssertionError) from the first `written` to
    `computed`: they share a block that the step has yet to fill, the next write to it copies it, and copies are made
    before the step. So the copy would be of something else.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int = 16,
        prefix_cache: bool = True,
        reach: int | None = None,
        secret: bytes | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """prefix_cache: whether full blocks can be found by their tokens. reach: how many keys back a query looks, its
        own included (None: all); sequences leave the blocks behind. secret: at most 64 bytes, for managers whose keys
        are compared; by default its own. snapshots: of states, where layers keep any and there is a prefix cache.
        Raises ConfigError below 1 block or token.
        """
        if blocks < 1 or block_size < 1:
            raise ConfigError(f"a paged cache needs at least 1 block of 1 token; found {blocks} of {block_size}")
        self.blocks, self.block_size, self.prefix_cache, self.reach = blocks, block_size, prefix_cache, reach
        self._sequences: dict[int, SequenceBlocks] = {}
        self._step: set[int] = set()  # sequences that `written` was given and that are not computed yet
        self._promised: list[bytes] = []  # keys of blocks that `written` offers to others before they are computed
        # Called when a step has run, with keys and blocks that it filled and that others can begin with.
        self.on_filled: Callable[[list[tuple[bytes, int]]], None] | None = None
        self._filled: list[tuple[bytes, int]] = []  # in this step
        self._references = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._cached: dict[bytes, int] = {}
        # Taken from the front. A cached block leaves from the middle when it is adopted, which an ordered dict does in
        # constant time; blocks without a key are put in front, so that they are used before any cached one.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        # Known to nobody outside: nobody there can make two texts whose keys collide.
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._stats = BlockStats()
        self.slots = StateSlots(snapshots)
        self._entries = 0  # of all tables

    @property
    def free(self) -> int:
        """Blocks that no sequence refers to; cached ones among them can be evicted at once."""
        return len(self._free)

    @property
    def stats(self) -> BlockStats:
        used = self.blocks - len(self._free)
        return replace(self._stats, used_blocks=used, blocks_saved=self._entries - used)

    @property
    def cached(self) -> dict[bytes, int]:
        """The blocks that can be found, by their keys (a copy). Any thread may ask."""
        return self._cached.copy()

    def keys(self, tokens: Sequence[int], *, salt: str = "") -> list[bytes]:
        """The keys of the full blocks that `begin` looks for."""
        found = prefix_keys(tokens[:-1], block_size=self.block_size, secret=self._secret, salt=salt)
        return list(found)[1:] if self.prefix_cache else []

    def finds(self, key: bytes) -> bool:
        """Whether a sequence can begin with the block of a key, now or in the next step."""
        return key in self._cached

    def computed_blocks(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Those of the keys that are found, with their blocks, but for blocks that the next step is to fill."""
        promised = set(self._promised)
        return [(key, self._cached[key]) for key in keys if key in self._cached and key not in promised]

    def adopt(self, keys: Sequence[bytes], found: Collection[bytes]) -> list[tuple[bytes, int]]:
        """Take free blocks for those of a beginning's keys that were found elsewhere, as many as there is room for.

        Returns (key, block): their contents must be written before the next step. They are as if a sequence had left
        them: any can begin with them, and until then they may be evicted, the end of the beginning first. None of
        `keys` is evicted for another.
        """
        free = [block for key in keys if (block := self._cached.get(key)) in self._free and block is not None]
        for block in free:
            self._free.move_to_end(block)
        adopted = []
        wanted = [key for key in keys if key in found and key not in self._cached]
        for key in wanted[: len(self._free) - len(free)]:
            block = next(iter(self._free))
            if self._keys[block] is not None:
                self._stats.evicted_blocks += 1
                self._unregister(block)
            self._cached[key], self._keys[block] = block, key
            self._free.move_to_end(block)
            self._promised.append(key)  # until the next step has run
            adopted.append((key, block))
        for key in reversed(keys):
            if (left := self._cached.get(key)) is not None and left in self._free:
                self._free.move_to_end(left)
        return adopted

    def begin(self, sequence: int, tokens: Sequence[int], *, salt: str = "", private: bool = False) -> int:
        """Start a sequence with the cached full blocks of its beginning; returns how many tokens they hold.

        Blocks to which no query looks back any more may be missing. At least one of the tokens is left to compute,
        because its logits are wanted. Sequences of different salts (tenants) share nothing through the cache, so that
        none can find out by timing what another has asked. private: nobody else has the salt, so `on_filled` is
        not called with its blocks.
        """
        assert sequence not in self._sequences, f"sequence {sequence} exists"
        keys = prefix_keys(tokens[:-1], block_size=self.block_size, secret=self._secret, salt=salt)
        chain, table = [next(keys)], []

        def there() -> Iterator[bool]:
            for key in keys:
                chain.append(key)
                table.append(-1 if (block := self._cached.get(key)) is None else block)
                yield block is not None

        count = usable_blocks(there() if self.prefix_cache else (), block_size=self.block_size, reach=self.reach)
        count = self.slots.usable(chain[1 : 1 + count])
        del chain[1 + count :], table[count:]
        held = count * self.block_size
        left = self._passed(held)
        table[:left] = table[-1:] * left  # instead of blocks that others may have now
        own = SequenceBlocks(table, chain, held, held, len(tokens), left, private=private)
        own.slot = self.slots.begin(chain[-1] if count else None)
        own.mark = max(0, len(tokens) - 1) // self.block_size * self.block_size
        self._sequences[sequence] = own
        for block in own.own:
            self._refer(block)
        return held

    def needs(self, sequence: int, length: int) -> int:
        """How many free blocks `reserve` would take."""
        own = self._sequences[sequence]
        return self._missing(own, length) + len(self._shared_tail(own, length))

    def reserve(self, sequence: int, length: int) -> list[tuple[int, int]]:
        """Make room for positions below `length`, to be written by this sequence alone.

        Returns (source, target) block numbers whose contents the caller must copy, in this order, before the step
        (copy on write). Raises OutOfBlocks.
        """
        own = self._sequences[sequence]
        if length <= own.room:
            return []
        missing, shared = self._missing(own, length), self._shared_tail(own, length)
        if missing + len(shared) > len(self._free):
            raise OutOfBlocks(
                f"{length} tokens of sequence {sequence} need {missing + len(shared)} more blocks of "
                f"{self.block_size}; {len(self._free)} of {self.blocks} are free"
            )
        copies = []
        for index in shared:
            source, target = own.block_table[index], self._take()
            self._leave(source)
            own.block_table[index] = target
            own.edits += 1
            copies.append((source, target))
        self._stats.copied_blocks += len(copies)
        for block in self._tail(own, length):
            self._unregister(block)  # what is findable there changes now
        own.block_table.extend(self._take() for _ in range(missing))
        own.room = length
        return copies

    def written(self, sequence: int, tokens: Sequence[int]) -> None:
        """All tokens of the sequence whose keys are in the cache, or will be after this step.

        Full blocks can be found from now on, by sequences that are begun for the same step too. Where another block
        with the same beginning is already known, both stay as they are: changing a table under a running sequence is a
        risk that saves one block.
        """
        own = self._sequences[sequence]
        assert own.held <= len(tokens) <= max(own.held, own.room), (
            f"sequence {sequence} has {own.held} tokens and room for {own.room}; found {len(tokens)}"
        )
        own.held = len(tokens)
        self._step.add(sequence)
        self._stats.prefix_queries += own.asked
        self._stats.prefix_hits += own.offered * self.block_size if own.asked else 0
        own.asked = 0
        if not self.prefix_cache:
            return
        for index in range(own.offered, len(tokens) // self.block_size):
            start = index * self.block_size
            key = next_key(self._secret, own.chain[index], tokens[start : start + self.block_size])
            own.chain.append(key)
            if key not in self._cached and self._keys[own.block_table[index]] is None:
                self._promised.append(key)
                if self.on_filled is not None and not own.private:
                    self._filled.append((key, own.block_table[index]))
                self._cached[key] = own.block_table[index]
                self._keys[own.block_table[index]] = key

    def computed(self) -> None:
        """Record that the step has run: what `written` was given is in the cache."""
        if self.on_filled is not None and self._filled:
            self.on_filled([(key, block) for key, block in self._filled if self._cached.get(key) == block])
            self._filled.clear()
        self.slots.computed(self._sequences[one] for one in self._step)
        for sequence in self._step if self.reach is not None else ():
            own = self._sequences[sequence]
            passed = self._passed(own.held)
            for block in own.block_table[own.left : passed]:
                self._leave(block)
            own.left = max(own.left, passed)
        self._step.clear()
        self._promised.clear()

    def fork(self, parent: int, child: int) -> None:
        """Start `child` as a copy of `parent` that shares all of its written blocks. Between steps only."""
        assert child not in self._sequences, f"sequence {child} exists"
        assert not self._step, f"a fork of sequence {parent} between `written` and `computed`"
        own = self._sequences[parent]
        self._shorten(own, own.held)  # room that is not written yet belongs to neither
        for block in own.own:
            self._refer(block)
        tables = own.block_table.copy(), own.chain.copy()
        self._sequences[child] = new = SequenceBlocks(*tables, own.held, own.held, 0, own.left, private=own.private)
        new.slot = self.slots.fork(own.slot)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the positions from `length` on (rejected guesses) and give back the blocks behind them.

        Between steps only. Those before it stay, also the ones that `written` was not given: guesses that a step
        found to be right. With a `reach` nothing that `written` was given can be forgotten: what came before may be
        gone.
        """
        assert not self._step, f"a truncation of sequence {sequence} between `written` and `computed`"
        own = self._sequences[sequence]
        if length <= own.room:
            self._shorten(own, length)
            own.held = length

    def release(self, sequence: int) -> None:
        """End a sequence. Its last blocks are reused first, so that beginnings stay in the cache longest."""
        own = self._sequences.pop(sequence)
        self.slots.end(own.slot)
        self._step.discard(sequence)
        for block in reversed(own.own):
            self._leave(block)

    def block_table(self, sequence: int) -> list[int]:
        """The sequence's blocks in order (a copy), the first that it still has in the place of those that it left."""
        left, own = self._sequences[sequence].left, self._sequences[sequence].own
        return own[:1] * left + own

    def table(self, sequence: int) -> SequenceBlocks:
        """The same as it is now and will be, not to be changed."""
        return self._sequences[sequence]

    def count(self, sequence: int) -> int:
        """How many blocks it has."""
        own = self._sequences[sequence]
        return len(own.block_table) - own.left

    def grow(self, blocks: int) -> None:
        """Have more blocks, `blocks` in all; they are used before any cached one."""
        self._references += [0] * (blocks - self.blocks)
        self._keys += [None] * (blocks - self.blocks)
        self._free = OrderedDict.fromkeys([*range(self.blocks, blocks), *self._free])
        self.blocks = blocks

    def forget(self) -> None:
        """Empty the prefix cache; running sequences keep their blocks."""
        for block in list(self._cached.values()):
            self._unregister(block)
        self.slots.forget()
        self.forget_promised()

    def forget_promised(self) -> None:
        """Take blocks that a failed step was to fill out of the prefix cache; running sequences keep theirs."""
        for key in self._promised:
            if key in self._cached:
                self._unregister(self._cached[key])
        self._promised.clear()
        self._filled.clear()
        self._step.clear()

    def check(self) -> None:
        """Raise AssertionError where the books do not agree. Takes time in proportion to all tables."""
        counted = [0] * self.blocks
        for number, own in self._sequences.items():
            held = len(own.block_table) * self.block_size
            assert own.held <= own.room <= held, f"sequence {number} has too few blocks"
            assert len(set(own.own)) == len(own.own), f"sequence {number} has a block twice"
            assert own.offered <= own.held // self.block_size, f"sequence {number} has keys of blocks that are not full"
            for block in own.own:
                counted[block] += 1
            for block in own.block_table[own.held // self.block_size : -(-own.room // self.block_size)]:
                if own.held < own.room:
                    assert self._references[block] == 1, f"sequence {number} may write to shared block {block}"
                    assert self._keys[block] is None, f"sequence {number} may write to cached block {block}"
        assert len({own.slot for own in self._sequences.values()}) == len(self._sequences), "two have one slot"
        assert self._step <= self._sequences.keys(), "a step has sequences that were released"
        assert counted == self._references, "references are not the tables' entries"
        assert all((count == 0) == (block in self._free) for block, count in enumerate(counted)), "free and used mix"
        assert len(self._free) + sum(count > 0 for count in counted) == self.blocks, "blocks were lost"
        assert self._entries == sum(counted), "entries were miscounted"
        assert self._stats.shared_blocks == sum(count > 1 for count in counted), "shared blocks were miscounted"
        keys = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keys == self._cached, "the prefix cache and the blocks' keys differ"

    def _passed(self, held: int) -> int:
        """Number of leading blocks to which no query from position `held` on looks back."""
        return passed_blocks(held, block_size=self.block_size, reach=self.reach)

    def _missing(self, own: SequenceBlocks, length: int) -> int:
        return max(0, -(-length // self.block_size) - len(own.block_table))

    def _tail(self, own: SequenceBlocks, length: int) -> list[int]:
        """The blocks it has in which positions from `held` on lie; none if a length holds no such position."""
        return own.block_table[own.held // self.block_size :] if own.held < length else []

    def _shared_tail(self, own: SequenceBlocks, length: int) -> list[int]:
        """Indices in its table of those among them that others refer to, too."""
        first = own.held // self.block_size
        return [first + i for i, block in enumerate(self._tail(own, length)) if self._references[block] > 1]

    def _shorten(self, own: SequenceBlocks, length: int) -> None:
        keep = -(-length // self.block_size)
        if keep < len(own.block_table):
            for block in reversed(own.block_table[keep:]):
                self._leave(block)
            del own.block_table[keep:]
            own.edits += 1
        own.held, own.room = min(own.held, length), length
        del own.chain[1 + own.held // self.block_size :]

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._keys[block] is not None:
            self._stats.evicted_blocks += 1
            self._unregister(block)
        self._references[block] = 1
        self._entries += 1
        return block

    def _refer(self, block: int) -> None:
        count = self._references[block]
        if count == 0:
            del self._free[block]
        self._stats.shared_blocks += count == 1
        self._references[block] = count + 1
        self._entries += 1

    def _leave(self, block: int) -> None:
        count = self._references[block] - 1
        self._references[block] = count
        self._entries -= 1
        self._stats.shared_blocks -= count == 1
        if count == 0:
            self._free[block] = None
            if self._keys[block] is None:
                self._free.move_to_end(block, last=False)

    def _unregister(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None
