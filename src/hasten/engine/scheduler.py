"""Which tokens of which sequences are computed in a step.

There are no phases. Every sequence has tokens, of which the first `computed` lie in the cache; in each step it catches
up towards its last token as far as the step's token budget reaches, and when it gets there, its next token is drawn. A
decode is one token behind; a prompt is many behind and is read in chunks; a prefix found in the cache starts further
on; a sequence whose blocks were taken away (preempted) starts from nothing again; guesses to be verified are tokens
more. (The idea of one budget without phases is vLLM's; blocks are arXiv 2309.06180's.)

Order: decodes first, so that a long prompt never stops them; then those that were begun; then the waiting, by priority
and arrival. While others have to catch up too, one sequence gets half of what is left, so that a short prompt does not
wait for all chunks of a long one. When the cache is full, the least important, youngest sequence gives its blocks
back and waits.

Pure Python: sequences and numbers, no tensors.
"""

from __future__ import annotations

import secrets
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from hasten.engine.blocks import BlockManager, OutOfBlocks, blocks_of
from hasten.engine.sequence import ScheduledTokens, TextSequence
from hasten.errors import ConfigError

_order = attrgetter("order")
_MOST_SCORED = 2048  # tokens of a step whose logits are wanted in float32: 1.2 GB of a vocabulary of 152k
_FEW, _PATIENCE = 8, 8  # while others wait, up to an eighth of the slots may stay free for 8 steps


Entries = dict[TextSequence, ScheduledTokens]


class Scheduler:
    """Owns the sequences and tells the block manager; see the module's text."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_sequences: int,
        token_budget: int,
        stretches_at: int | None = None,
        block_each: bool = False,
        keeps_states: bool = False,
    ) -> None:
        """stretches_at, keeps_states: as in `ModelConfig`. block_each: a sequence's first block has room for all of its
        tokens.
        """
        if token_budget < max_sequences:
            raise ConfigError(f"a step of {token_budget} tokens has no room for one of each of {max_sequences} texts")
        self.blocks, self.max_sequences, self.token_budget = blocks, max_sequences, token_budget
        self.stretches_at, self._block_each, self.keeps_states = stretches_at, block_each, keeps_states
        self.running: list[TextSequence] = []  # by order
        self.waiting: list[TextSequence] = []  # by order
        # Asked before a sequence begins, with what finds the keys of its blocks: False, and it is asked again later.
        self.ready: Callable[[TextSequence, Callable[[], list[bytes]]], bool] | None = None
        self.gone: Callable[[TextSequence], None] | None = None  # called with one that ends while it waits
        self.preemptions = 0
        self.steps = 0  # planned or launched since a waiting sequence last began
        self._full = False  # the last admission ended because the slots were all taken
        self._numbers = 0
        self._requests = 0
        # The first that waits, and the free blocks it did not fit in.
        self._no_room: tuple[TextSequence, int] | None = None

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(
        self, tokens: Sequence[int], *, priority: int = 0, salt: str | None = "", slots: int = 1, adapter: int = -1
    ) -> TextSequence:
        """The prompt of a new request, which waits. slots: how many it will be forked into, itself included.

        salt: None, and it shares blocks with no other request.
        """
        self._numbers += 1
        self._requests += 1
        new = TextSequence(
            number=self._numbers,
            order=(priority, self._requests, self._numbers),
            tokens=list(tokens),
            salt=secrets.token_hex(8) if salt is None else salt,
            private=salt is None,
            adapter=adapter,
            slots=slots,
        )
        if not self.waiting:
            self._full = False  # whoever had no slot then has it, or has gone
        insort(self.waiting, new, key=_order)
        return new

    def fork(self, parent: TextSequence) -> TextSequence:
        """Another sequence with the same tokens, sharing all blocks (or waiting, as its parent does)."""
        self._numbers += 1
        order = (*parent.order[:2], self._numbers)
        child = replace(parent, number=self._numbers, order=order, tokens=list(parent.tokens), drafts=[], slots=1)
        child.begun = True
        parent.slots = max(1, parent.slots - 1)  # what was kept free for the child
        if parent.running:
            self.blocks.fork(parent.number, child.number)
            insort(self.running, child, key=_order)
        else:
            insort(self.waiting, child, key=_order)
        return child

    def accept(self, sequence: TextSequence, tokens: Sequence[int]) -> None:
        """Tokens that were drawn after a complete step: the drafts that were right, and one more."""
        known = len(sequence.tokens)
        sequence.tokens.extend(tokens)
        if sequence.drafts:
            sequence.drafts.clear()
            if sequence.running:
                # States are those before the drafts: what was right of them is computed again.
                sequence.computed = known if self.keeps_states else known + len(tokens) - 1
                self.blocks.truncate(sequence.number, sequence.computed)

    def finish(self, sequence: TextSequence) -> None:
        """The sequence ends; its blocks are free at once."""
        if sequence.running:
            self.blocks.release(sequence.number)
            self.running.remove(sequence)
            sequence.running = False
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            if self.gone is not None:
                self.gone(sequence)

    @property
    def behind(self) -> int:
        """Tokens of prompts that the next step may read beside the sequences that are one behind."""
        begun = sum(max(0, len(one.tokens) - one.computed - 1) for one in self.running)
        return min(begun + sum(len(one.tokens) for one in self.waiting[:1]), self.token_budget)

    @property
    def settled(self) -> bool:
        """Whether the next step may give the running sequences their next tokens, and begin no other.

        Where slots were all taken, those that wait begin some at a time, a few steps late.
        """
        if self.nobody_begins:
            return True
        if not self.running or self.waiting[0].order[0] < self.running[-1].order[0]:
            return False
        free = self.max_sequences - self._slots
        return self._full and free * _FEW <= self.max_sequences and self.steps < _PATIENCE

    @property
    def nobody_begins(self) -> bool:
        """Whether none of those that wait has room now."""
        if not self.waiting or not self.running:
            return not self.waiting
        first = self.waiting[0]
        if first.order[0] < self.running[-1].order[0]:
            return False  # the last one makes way for it
        if first.slots > self.max_sequences - self._slots:
            return True
        return self._no_room is not None and self._no_room[0] is first and self.blocks.free <= self._no_room[1]

    @property
    def can_read_prompts(self) -> bool:
        """True if prompts can be read now, while next tokens are awaited, without preempting anyone."""
        free, first = self.blocks.free, self.waiting[0] if self.waiting else None
        if free < self.token_budget // self.blocks.block_size + 2 * len(self.running) + 2:
            return False
        if first is not None and self.running and first.order[0] < self.running[-1].order[0]:
            return False
        if any(sequence.computed < len(sequence.tokens) - 1 for sequence in self.running):
            return True
        if first is None or first.begun or self.settled:
            return False
        return free > self.most_blocks(first.target) + len(self.running)

    @property
    def _slots(self) -> int:
        """Slots of the running sequences."""
        return sum(sequence.slots for sequence in self.running)

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, *, begin: bool = True) -> list[ScheduledTokens]:
        """What the next step computes; empty if there is nothing to do. Its blocks are reserved.

        begin: whether sequences that wait may begin; not to be forbidden unless `settled`.
        """
        entries: Entries = {}
        self.steps += 1
        if self.stretches_at is not None:
            self._stretch(self.stretches_at)
        if begin:
            self._make_way()
        left = self._plan_running(entries)
        if begin:
            left = self._admit(entries, left)
        if not entries and self.waiting and self.running:
            # Beams wait for a sibling that does not fit beside them and others: from the beginning, the oldest first.
            for sequence in reversed(self.running.copy()):
                self._preempt(sequence)
            self._admit(entries, self.token_budget)
        else:
            self._top_up(entries, left)
        for entry in entries.values() if self.keeps_states else ():
            entry.guesses = max(0, entry.end - len(entry.sequence.tokens))
        return list(entries.values())

    def _stretch(self, length: int) -> None:
        """Have the sequences computed again that are longer than this now."""
        for sequence in self.running:
            if not sequence.stretched and sequence.target > length:
                self.blocks.release(sequence.number)
                sequence.stretched = True
                sequence.computed = self._begin_blocks(sequence)

    def _begin_blocks(self, sequence: TextSequence) -> int:
        """Start its blocks with those of the prefix cache; how many of its tokens these hold."""
        own, salt = sequence.tokens, sequence.block_salt
        return self.blocks.begin(sequence.number, own, salt=salt, private=sequence.private)

    def advance(self, plan: list[ScheduledTokens]) -> None:
        """The step has been computed."""
        self.blocks.computed()
        for entry in plan:
            entry.sequence.computed = entry.end

    def _make_way(self) -> None:
        """A waiting sequence of a smaller priority number does not wait for the room of a larger one."""
        while self.waiting and self.running and self.waiting[0].order[0] < self.running[-1].order[0]:
            first = self.waiting[0]
            enough = self.blocks.free >= self.most_blocks(first.target) + len(self.running)
            if enough and self._slots + first.slots <= self.max_sequences:
                return
            self._preempt(self.running[-1])

    def _plan_running(self, entries: Entries) -> int:
        left = self.token_budget
        level: list[TextSequence] = []
        behind: list[TextSequence] = []
        for sequence in self.running:  # one that awaits its token has nothing to compute
            missing = len(sequence.tokens) - 1 - sequence.computed
            if missing >= 0:
                (behind if missing else level).append(sequence)
        for index, sequence in enumerate(level):
            if sequence.running:
                # Guesses take what is left when everybody else has a token.
                count = min(sequence.target - sequence.computed, left - (len(level) - 1 - index))
                del sequence.drafts[count - 1 :]
                left -= self._schedule(sequence, count, entries)
        for index, sequence in enumerate(behind):
            if left and sequence.running:
                others = index + 1 < len(behind) or bool(self.waiting)
                count = self._chunk(sequence.target - sequence.computed, left, others=others)
                count = self._until_snapshot(sequence, self._scorable(sequence, count, entries))
                self._trim(sequence, sequence.computed + count)
                if count:
                    left -= self._schedule(sequence, count, entries)
        # Only now: nobody in the plan can be preempted any more, so what is offered to others will be computed.
        for entry in entries.values():
            self._offer(entry)
        return self.token_budget - sum(entry.count for entry in entries.values())

    def _admit(self, entries: Entries, left: int) -> int:
        slots = self._slots if self.waiting else 0
        self._full = False
        while left and self.waiting:
            first = self.waiting[0]
            if slots + first.slots > self.max_sequences:
                self._full = True
                break
            if first.begun and self._sibling_reads(first, entries):
                break  # it finds the blocks it had in common with it once they are there
            if not self._scorable(first, 1, entries):
                break
            if not self._begin(first):
                break
            self.waiting.pop(0)
            self.steps = 0
            slots += first.slots
            todo = first.target - first.computed
            count = self._scorable(first, self._chunk(todo, left, others=bool(self.waiting)), entries)
            count = self._until_snapshot(first, count)
            copies = self.blocks.reserve(first.number, first.computed + count)
            first.running = first.begun = True
            insort(self.running, first, key=_order)
            entries[first] = entry = self._entry(first, count, copies)
            self._offer(entry)
            left -= count
        return left

    def _sibling_reads(self, sequence: TextSequence, entries: Entries) -> bool:
        """Whether another one of its request is being read again, and will not be done in this step."""
        siblings = (s for s in self.running if s.request == sequence.request and s.computed < len(s.tokens) - 1)
        return any(s not in entries or not entries[s].complete for s in siblings)

    def _begin(self, sequence: TextSequence) -> bool:
        """Adopt its cached beginning, if all of it fits and everybody who runs can still take a block."""
        free = self.blocks.free
        if self.running and self._no_room is not None and self._no_room[0] is sequence and free <= self._no_room[1]:
            return False
        sequence.stretched = self.stretches_at is not None and sequence.target > self.stretches_at
        own, salt = sequence.tokens, sequence.block_salt
        if self.ready is not None and not self.ready(sequence, lambda: self.blocks.keys(own, salt=salt)):
            return False
        found = self._begin_blocks(sequence)
        size, held = self.blocks.block_size, self.blocks.count(sequence.number)
        missing = min(self.most_blocks(sequence.target) - held, -(-sequence.target // size) - found // size)
        others = 0 if self._block_each else len(self.running)
        if self.running and missing + others > self.blocks.free:
            self.blocks.release(sequence.number)
            self._no_room = (sequence, free)
            return False
        sequence.computed = found
        if not sequence.begun:
            sequence.cached = found
        return True

    def _top_up(self, entries: Entries, left: int) -> None:
        """Give what others left of the budget to those that are still behind."""
        for entry in list(entries.values()):
            if not left:
                return
            sequence = entry.sequence
            more = min(left, sequence.target - entry.end) if sequence.scored <= entry.end else 0
            more = self._until_snapshot(sequence, more, begun=entry.count)
            if more:
                self._trim(sequence, entry.end + more)
                try:
                    entry.copies += self.blocks.reserve(sequence.number, entry.end + more)
                except OutOfBlocks:
                    continue
                entry.count += more
                left -= more
                self._offer(entry)

    def _trim(self, sequence: TextSequence, end: int) -> None:
        """Leave out guesses that a step up to `end` has no room for."""
        if end >= len(sequence.tokens):
            del sequence.drafts[end - len(sequence.tokens) :]

    def _chunk(self, todo: int, left: int, *, others: bool) -> int:
        return min(todo, max(-(-left // 2), min(left, self.blocks.block_size)) if others else left)

    def _scorable(self, sequence: TextSequence, count: int, entries: Entries) -> int:
        """count, or fewer tokens of a prompt that is scored: the step's logits must not take too much memory."""
        if sequence.scored <= sequence.computed:
            return count
        return max(0, min(count, _MOST_SCORED - sum(entry.scored for entry in entries.values())))

    def _until_snapshot(self, sequence: TextSequence, count: int, *, begun: int = 0) -> int:
        """Limit its next `count` tokens in a step, behind `begun` others: a step ends at a snapshot."""
        first, table = sequence.computed, self.blocks.table(sequence.number)
        return self.blocks.slots.until_due(table, first, first + begun, count)

    def _schedule(self, sequence: TextSequence, count: int, entries: Entries) -> int:
        """Plan its next `count` tokens, with blocks of the last in order if need be; 0 if that is itself."""
        while True:
            try:
                copies = self.blocks.reserve(sequence.number, sequence.computed + count)
            except OutOfBlocks:
                if sequence.drafts:  # nobody makes room for guesses
                    sequence.drafts.clear()
                    count = 1
                    continue
                victim = self.running[-1]
                entries.pop(victim, None)
                self._preempt(victim)
                if victim is sequence:
                    return 0
            else:
                entries[sequence] = self._entry(sequence, count, copies)
                return count

    def _entry(self, sequence: TextSequence, count: int, copies: list[tuple[int, int]]) -> ScheduledTokens:
        """The sequence's next `count` tokens."""
        table = self.blocks.table(sequence.number)
        start, stretched = sequence.computed, sequence.stretched
        return ScheduledTokens(table, start, count, stretched, sequence=sequence, copies=copies)

    def _preempt(self, sequence: TextSequence) -> None:
        self.blocks.release(sequence.number)
        self.running.remove(sequence)
        sequence.running, sequence.computed, sequence.sought = False, 0, False
        sequence.drafts.clear()
        insort(self.waiting, sequence, key=_order)
        self.preemptions += 1
        self._no_room = None

    def _offer(self, entry: ScheduledTokens) -> None:
        """Offer the blocks that this step fills; guesses are offered to nobody."""
        tokens = entry.sequence.tokens
        self.blocks.written(entry.sequence.number, tokens if entry.end >= len(tokens) else tokens[: entry.end])

    def most_blocks(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens has at once, at most. Any thread may ask."""
        return blocks_of(tokens, self.blocks.block_size, reach=self.blocks.reach, step=self.token_budget)

    def check(self) -> None:
        """Raise AssertionError where the books do not agree."""
        self.blocks.check()
        assert self.running == sorted(self.running, key=_order)
        assert self.waiting == sorted(self.waiting, key=_order)
        assert all(s.running for s in self.running)
        assert not any(s.running or s.computed for s in self.waiting)
        assert self._slots <= self.max_sequences
        assert all(s.computed <= s.target for s in self.running)
