"""Decode steps launched before the tokens of the one before are known, so that a GPU does not wait for the host.

The tokens stay on the device (`hasten.engine.batch_runner.BatchRunner`); the host reads them one step late. A text that
ended has then been computed one token too far: that token is dropped. As the device works in order, its block can be
given to others at once. Only for steps in which nothing is decided on the host: one token of each sequence, no
constraint, no log-probabilities, no drafts, no beams.

While prompts are read, a step's tokens are read behind the launch of the next one, which goes on with other prompts.
Sequences that wait for their token skip that step, so this is done for short steps only. The first step of a run of
decode steps takes the tokens of the last prompts' step on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hasten.engine.batch_runner import Drawn
from hasten.engine.blocks import OutOfBlocks
from hasten.engine.request_state import RequestTable
from hasten.engine.run import Group
from hasten.engine.runner import ModelRunner, common_adapter
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import ScheduledTokens, TextSequence
from hasten.machine.host_copy import HostCopy

if TYPE_CHECKING:
    from hasten.engine.continuations import Continuations

_SHORT = 0.025  # seconds of a step behind which another one may be launched that gives nobody a token
_CAUGHT_UP = 16  # steps in which each text that is given out at its end is decoded once


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: the sequences that take a token in it, and these tokens on their way.

    group: of which they are; None: a step of its own. last: one of them is full with its token. ended: the table's
    count at the launch.
    """

    outputs: list[TextSequence]
    drawn: Drawn
    group: Group | None
    last: bool
    ended: int
    tokens: Tensor | None = None  # on the device, of a step of its own

    def all_of(self, table: RequestTable) -> Group | None:
        """The group, if all of its sequences are there and none is full; each has only `end_ids` to end at."""
        return None if self.last or self.ended != table.ended else self.group


@dataclass(frozen=True, slots=True)
class Started:
    """The first step of a run, launched before its own tokens were read. ended: the table's count then."""

    outputs: list[TextSequence]
    drawn: Drawn
    ended: int


class Ahead:
    """The step in flight, if any, and the launch of the one behind it."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, table: RequestTable) -> None:
        self.runner, self.scheduler, self.blocks, self.table = runner, scheduler, scheduler.blocks, table
        self.flight: Flight | None = None
        self.late: Flight | None = None  # a planned step whose tokens are read when the next, of others, is launched
        self._short = True  # the latest step with prompts was
        # Where each sequence of a run of steps fills a block, in steps modulo its size; `_step` is the latest.
        self._fills: list[list[TextSequence]] = []
        self._step = 0

    @property
    def patient(self) -> bool:
        """Whether those that wait wait a few steps more, so that the others go on in a run of steps launched ahead."""
        return self.runner.decoder is not None and self.scheduler.settled

    def begin(self, plan: Sequence[ScheduledTokens]) -> bool | None:
        """Launch a planned step, whose tokens `flight` has then. False: it is not captured. None: it needs the host."""
        decoder = self.runner.decoder
        if decoder is None:
            return None
        own: list[TextSequence] = []
        outputs = self.table.outputs
        for entry in plan:
            sequence = entry.sequence
            if sequence not in outputs or entry.count != 1 or not entry.complete or sequence.drafts:
                return None
            if _needs_host(sequence):
                return None
            own.append(sequence)
        adapter = common_adapter(plan)
        if adapter is None:
            return None
        drawn = decoder.begin(plan, adapter=adapter)
        if drawn is None:
            return False
        self._run(own, drawn, ended=self.table.ended)
        return True

    def _run(self, own: list[TextSequence], drawn: Drawn, *, ended: int) -> None:
        """A run of steps was begun by one of these sequences, all of whose tokens are in the cache with it."""
        size = self.blocks.block_size
        self._step, self._fills = 0, [[] for _ in range(size)]
        for output in own:
            if self.table.has(output):
                number, length = output.number, len(output.tokens)
                self.blocks.reserve(number, -(-length // size) * size)  # all of its last block, which is nobody else's
                self._fills[-length % size].append(output)
        self.flight = _launched(Group(own, pending=0, ended=ended), drawn)

    def launch_behind(self, flight: Flight) -> Flight | Started | None:
        """Launch the step behind one whose tokens are on their way; None where the host must plan it."""
        return self.go_on() if flight is self.flight else self.begin_behind(flight)

    def taken(self, flight: Flight, behind: Flight | Started | None) -> None:
        """The tokens of a step were taken, with the one that was launched behind it on its way."""
        if isinstance(behind, Started):
            self.arrived(behind)
        elif flight is self.flight:
            self.landed(behind)

    def begin_behind(self, late: Flight) -> Started | None:
        """Launch a run's first step behind one whose tokens are on their way; None where the host must plan it.

        Its own tokens are those of `late`, on the device. `arrived` is to be called when they were taken.
        """
        decoder, outputs, blocks = self.runner.decoder, self.table.outputs, self.blocks
        if decoder is None or late.tokens is None or not self.scheduler.settled:
            return None
        places = {one: place for place, one in enumerate(late.outputs)}
        own: list[TextSequence] = []
        behind: tuple[list[int], list[int]] = ([], [])  # of those of `late`: numbers, and places of their tokens
        for sequence in self.scheduler.running:
            if sequence not in outputs or sequence.drafts or _needs_host(sequence) or sequence.params.needs_history:
                return None
            at, known = sequence.computed, len(sequence.tokens)
            if at == known:
                if sequence not in places:
                    return None
                if at + 1 >= sequence.full:
                    continue  # it ends with the token on its way
                behind[0].append(sequence.number)
                behind[1].append(places[sequence])
            elif at != known - 1:
                return None
            own.append(sequence)
        adapters = {one.adapter for one in own}
        if len(adapters) != 1 or not self._reserve(own):
            return None
        plan = [ScheduledTokens(blocks.table(one.number), one.computed, 1, sequence=one) for one in own]
        drawn = decoder.begin(plan, adapter=adapters.pop(), behind=(*behind, late.tokens))
        return None if drawn is None else Started(own, drawn, self.table.ended)

    def _reserve(self, outputs: Sequence[TextSequence]) -> bool:
        """Make room for the next token of each; False where there is not enough."""
        copies: list[tuple[int, int]] = []
        try:
            for one in outputs:
                copies += self.blocks.reserve(one.number, one.computed + 1)
        except OutOfBlocks:
            return False
        finally:
            if copies:
                self.runner.copy(copies)
        return True

    def arrived(self, started: Started) -> None:
        """The tokens were taken behind which a run was begun: it is in flight."""
        for output in started.outputs:
            if self.table.has(output):
                output.computed = len(output.tokens)
                self.blocks.written(output.number, output.tokens)
        self.blocks.computed()
        self.scheduler.steps += 1
        self._run(started.outputs, started.drawn, ended=started.ended)

    def defer(self, logits: Tensor, growing: dict[TextSequence, int], continuations: Continuations) -> bool:
        """Have the tokens of a computed step read later; False: they are wanted now. growing: first row of each."""
        decoder = self.runner.decoder
        if decoder is None or not self._short or not growing or any(map(_needs_host, growing)):
            return False
        tokens = continuations.draw(logits, growing)
        for one in growing:  # it decodes soon: while the device computes
            decoder.sampler.pack(one)
        drawn = Drawn(list(range(len(growing))), HostCopy(tokens))
        self.late = Flight(list(growing), drawn, None, True, self.table.ended, tokens)
        return True

    def took(self, plan: Sequence[ScheduledTokens], seconds: float) -> None:
        """Record how long a step took until its tokens were there."""
        if any(entry.count > 1 for entry in plan):
            self._short = seconds < _SHORT

    def go_on(self) -> Flight | None:
        """Launch the step behind the one in flight; None where the host must plan it."""
        decoder, flight, blocks = self.runner.decoder, self.flight, self.blocks
        assert decoder is not None
        assert flight is not None
        if not self.scheduler.settled:
            return None
        group, table = flight.group, self.table
        assert group is not None
        if flight.last or flight.ended != table.ended:
            going = [one for one in flight.outputs if len(one.tokens) + 1 < one.full and table.has(one)]
            if not going:
                return None
            group = Group(going, pending=1, ended=table.ended)
        copies, grown, size = [], [], blocks.block_size
        for one in self._fills[self._step % size]:  # the step in flight fills its block: now it enters the next
            length = len(one.tokens) + 1
            if length < one.full and table.has(one):
                try:
                    copies += blocks.reserve(one.number, length - 1 + size)
                except OutOfBlocks:
                    self.runner.copy(copies)
                    return None
                grown.append((one.number, blocks.table(one.number)))
        if copies:
            self.runner.copy(copies)
        drawn = decoder.go_on(group.numbers, grown, longest=group.longest)
        self.scheduler.steps += drawn is not None
        return None if drawn is None else _launched(group, drawn)

    def landed(self, following: Flight | None) -> None:
        """The tokens of the step in flight were taken; `following`, launched behind it, is in flight now."""
        table, flight, self.flight = self.table, self.flight, following
        assert flight is not None
        if following is not None:
            self._step += 1
            step, size = self._step, self.blocks.block_size
            for one in self._fills[step % size]:
                if table.has(one):  # its block is full: others may find it
                    self.blocks.written(one.number, one.tokens)
            self.blocks.computed()
            for one in following.outputs[step % _CAUGHT_UP :: _CAUGHT_UP]:
                one.catch_up()
            if following.ended == table.ended or any(table.has(one) for one in following.outputs):
                return
            self.flight = None
        for one in flight.outputs:  # the run is over
            one.computed = len(one.tokens) - 1


def _launched(group: Group, drawn: Drawn) -> Flight:
    """Count a step of the group that was launched."""
    group.steps -= 1
    group.longest += 1
    return Flight(group.outputs, drawn, group, group.steps == 0, group.ended)


def _needs_host(output: TextSequence) -> bool:
    """Whether its tokens are drawn with something that only the host has."""
    return output.constraint is not None or output.state.wants_logprobs
