"""Decode steps launched before the tokens of the one before are known, so that a GPU does not wait for the host.

The tokens stay on the device (`hasten.engine.runner.BatchRunner`); the host reads them one step late. A text that ended
has then been computed one token too far: that token is dropped. As the device works in order, its block can be given to
others at once. Only for steps in which nothing is decided on the host: one token of each sequence, no constraint, no
log-probabilities, no drafts, no beams.

While prompts are read, a step's tokens are read behind the launch of the next one, which goes on with other prompts.
Sequences that wait for their token skip that step, so this is done for short steps only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hasten.engine.runner import Drawn, ModelRunner
from hasten.engine.sampler import DrawnRow
from hasten.generation.blocks import OutOfBlocks
from hasten.generation.stopping import stop_ids
from hasten.machine.host_copy import HostCopy
from hasten.serving.model_runner import Sampler, common_adapter, part_of
from hasten.serving.request_state import OutputSequence
from hasten.serving.scheduler import ScheduledSequence, ScheduledTokens, Scheduler

_SHORT = 0.025  # seconds of a step behind which another one may be launched that gives nobody a token

Outputs = Mapping[ScheduledSequence, OutputSequence]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: the sequences that take a token in it, and these tokens on their way."""

    outputs: list[OutputSequence]
    drawn: Drawn


class Ahead:
    """The step in flight, if any, and the launch of the one behind it."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, *, eos_ids: frozenset[int]) -> None:
        self.runner, self.scheduler, self.blocks, self.eos_ids = runner, scheduler, scheduler.blocks, eos_ids
        self.flight: Flight | None = None
        self.late: Flight | None = None  # a planned step whose tokens are read when the next, of others, is launched
        self._short = True  # the latest step with prompts was
        self._rows: dict[OutputSequence, DrawnRow] = {}

    def begin(self, plan: Sequence[ScheduledTokens], outputs: Outputs) -> bool | None:
        """Launch a planned step, whose tokens `flight` has then. False: it is not captured. None: it needs the host."""
        decoder = self.runner.decoder
        if decoder is None:
            return None
        own: list[OutputSequence] = []
        for entry in plan:
            output = outputs.get(entry.sequence)
            if output is None or entry.count != 1 or not entry.complete or entry.sequence.drafts:
                return None
            if _needs_host(output):
                return None
            own.append(output)
        adapter = common_adapter(plan)
        if adapter is None:
            return None
        known, vocab_size = self._rows, decoder.sampler.vocab_size
        self._rows = {one: known.get(one) or _row(one, vocab_size, self.eos_ids) for one in own}
        parts = [part_of(entry, self.blocks) for entry in plan]
        texts = [output.sequence.tokens for output in own]
        drawn = decoder.begin(parts, list(self._rows.values()), texts, adapter=adapter)
        if drawn is not None:
            self.flight = Flight(own, drawn)
        return drawn is not None

    def defer(self, logits: Tensor, growing: Mapping[OutputSequence, int], sampler: Sampler) -> bool:
        """Have the tokens of a computed step read later; False: they are wanted now. growing: first row of each."""
        if self.runner.decoder is None or not self._short or not growing or any(map(_needs_host, growing)):
            return False
        tokens = sampler.sample_later(logits, list(growing), list(growing.values()))
        self.late = Flight(list(growing), Drawn(list(range(len(growing))), HostCopy(tokens)))
        return True

    def took(self, plan: Sequence[ScheduledTokens], seconds: float) -> None:
        """Record how long a step took until its tokens were there."""
        if any(entry.count > 1 for entry in plan):
            self._short = seconds < _SHORT

    def go_on(self, outputs: Outputs) -> Flight | None:
        """Launch the step behind the one in flight; None where the host must plan it."""
        decoder, flight, blocks = self.runner.decoder, self.flight, self.blocks
        assert decoder is not None
        assert flight is not None
        if not self.scheduler.settled:
            return None
        going = [one for one in flight.outputs if outputs.get(one.sequence) is one and one.awaits_more]
        if not going:
            return None
        longest, size, copies, grown = 0, blocks.block_size, [], []
        for one in going:
            number, length = one.sequence.number, len(one.sequence.tokens) + 1  # in the cache after the step
            longest = max(longest, length)
            table = blocks.table(number)
            if table.room < length:
                try:  # all of a block at once: it is nobody else's
                    copies += blocks.reserve(number, -(-length // size) * size)
                except OutOfBlocks:
                    self.runner.copy(copies)
                    return None
                grown.append((number, table))
        self.runner.copy(copies)
        drawn = decoder.go_on([one.sequence.number for one in going], grown, longest=longest)
        return None if drawn is None else Flight(going, drawn)

    def landed(self, following: Flight | None, outputs: Outputs) -> None:
        """The tokens of the step in flight were taken; `following`, launched behind it, is in flight now."""
        self.flight = None
        if following is None:
            return
        size, any_left = self.blocks.block_size, False
        for one in following.outputs:
            sequence = one.sequence
            if outputs.get(sequence) is one:
                any_left = True
                sequence.computed = known = len(sequence.tokens)
                if known % size == 0:  # a block is full: others may find it
                    self.blocks.written(sequence.number, sequence.tokens)
        self.blocks.computed()
        if any_left:
            self.flight = following


def _needs_host(output: OutputSequence) -> bool:
    """Whether its tokens are drawn with something that only the host has."""
    return output.constraint is not None or output.state.wants_logprobs


def _row(output: OutputSequence, vocab_size: int, eos_ids: frozenset[int]) -> DrawnRow:
    ends = stop_ids(output.params, eos_ids=eos_ids)
    return DrawnRow(output.params, prompt=output.state.request.prompt, end_ids=ends, vocab_size=vocab_size)
