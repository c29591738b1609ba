"""Runs of decode steps: while the same sequences take one token each, a step does only what changed since the last.

Plan, block tables and sampling parameters stay as they are. What happens to few sequences in few steps (one enters a
block, fills one, or ends) is known ahead, so that a step costs the host little however many sequences there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hasten.engine.blocks import OutOfBlocks
from hasten.engine.request import RequestOutput
from hasten.engine.request_state import RequestTable
from hasten.engine.sampler import Sampler
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import ScheduledTokens, TextSequence

if TYPE_CHECKING:
    from hasten.engine.continuations import Continuations
    from hasten.engine.runner import ModelRunner


class Group:
    """Sequences that take a token in each of a run of steps, and what is known ahead of all these steps.

    steps: how many are left until one of the sequences is full.
    """

    def __init__(self, outputs: list[TextSequence], *, pending: int, ended: int) -> None:
        """pending: tokens that each has on its way. ended: the table's count of ends that `outputs` follows."""
        self.outputs, self.ended = outputs, ended
        self.numbers = [one.number for one in outputs]
        self.texts = [one.tokens for one in outputs]
        lengths = [len(one.tokens) + pending for one in outputs]
        self.longest = max(lengths)  # tokens in the cache after the next step
        self.steps = min(one.full - length for one, length in zip(outputs, lengths, strict=True))
        self.end_ids = frozenset[int]().union(*{one.end_ids for one in outputs})
        self.only_ids_end_it = all(one.only_ids_end_it for one in outputs)
        self.gathers = self.only_ids_end_it and all(one.gathers for one in outputs)

    def take(self, tokens: list[int]) -> list[RequestOutput] | None:
        """Take a token each; returns what is given out. None, and none is taken, where one may end its text."""
        if not self.only_ids_end_it or not self.end_ids.isdisjoint(tokens):
            return None
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        if self.gathers:
            return []
        return [shown(one, token) for one, token in zip(self.outputs, tokens, strict=True) if not one.gathers]


class DecodeRun(Group):
    """The steps of a group whose tokens the host reads one step after the other.

    Begun after a step that computed one token of each of these sequences, in this order. It is over when a sequence
    ends, another one may begin, or `next_step` returns None.
    """

    def __init__(
        self, outputs: list[TextSequence], sampler: Sampler, scheduler: Scheduler, table: RequestTable
    ) -> None:
        """sampler: drew for these sequences, in this order."""
        super().__init__(outputs, pending=0, ended=table.ended)
        self.sampler, self.prompt_lengths = sampler, [one.prompt_length for one in outputs]
        self._scheduler, self._blocks, self._table = scheduler, scheduler.blocks, table
        self.adapters = [one.adapter for one in outputs]
        size = self._blocks.block_size
        # Which rows fill a block in a step, by the step's number modulo the block's size; they enter one in the next.
        self._fills: list[list[int]] = [[] for _ in range(size)]
        self._step = 0
        self._wrote = False  # whether blocks are offered to others that the step computes
        self._restart: int | None = None  # the step for which a sequence is computed again
        if (length := scheduler.stretches_at) is not None:
            self._restart = min((length - len(one.tokens) + 1 for one in outputs if not one.stretched), default=None)
        for row, (number, text) in enumerate(zip(self.numbers, self.texts, strict=True)):
            self._fills[-len(text) % size].append(row)
            self._blocks.reserve(number, -(-(len(text) - 1) // size) * size)  # the rest of the block it writes to

    @property
    def drafted(self) -> bool:
        """Whether a sequence has a draft to be checked."""
        return any(one.drafts for one in self.outputs)

    def next_step(self, runner: ModelRunner, continuations: Continuations) -> list[RequestOutput] | None:
        """Compute the next token of each sequence; what that adds. None where the step has to be planned."""
        speculator, counts = continuations.speculator, continuations.counts
        if (speculator is not None and self.drafted) or (entered := self.enter()) is None:
            return None
        started = time.perf_counter()
        if runner.model.adapters is not None and runner.chooses_adapters:
            runner.model.adapters.choose(self.adapters, runner.model.device)
        logits = runner.next_logits([text[-1] for text in self.texts], entered)
        if logits is None:
            return None
        if speculator is not None:
            speculator.take_states([(one.number, one.computed, 1) for one in self.outputs], runner.last_states)
        counts.model_seconds += time.perf_counter() - started
        counts.steps += 1
        counts.computed_tokens += len(self.texts)
        self.computed()
        if speculator is None and self.only_ids_end_it:
            steps = [len(text) - prompt for text, prompt in zip(self.texts, self.prompt_lengths, strict=True)]
            tokens = self.sampler.next_tokens(logits, steps=steps).tolist()
            found = self.take(tokens) if self.steps else None
            if found is None:  # one of them may end
                return continuations.take_each(self.outputs, tokens)
            counts.generated_tokens += len(tokens)
            return found
        found = continuations.grow(logits, {one: row for row, one in enumerate(self.outputs)})
        if speculator is not None:
            speculator.stepped(len(self.texts), time.perf_counter() - started)
        return found

    def enter(self) -> list[tuple[int, int]] | None:
        """Get ready for the next step; returns (row, block) of each sequence that enters a block.

        None where the run is over: a sequence has ended, or others may begin.
        Also where a block is missing, or has left the window of a sequence, or a sequence is to be computed again: the
        step has to be planned.
        """
        blocks, size = self._blocks, self._blocks.block_size
        entered: list[tuple[int, int]] = []
        if self.ended != self._table.ended or self._step == self._restart:
            return None
        if self._scheduler.waiting and not self._scheduler.nobody_begins:
            return None
        for row in self._fills[(self._step - 1) % size]:
            number, start = self.numbers[row], len(self.texts[row]) - 1
            if blocks.reach is not None:
                return None
            try:
                blocks.reserve(number, start + size)
            except OutOfBlocks:
                return None
            entered.append((row, blocks.table(number).block_table[start // size]))
        for row in self._fills[self._step % size]:  # others may find it from now on
            blocks.written(self.numbers[row], self.texts[row])
            self._wrote = True
        self._step += 1
        return entered

    def computed(self) -> None:
        """The step has been computed; its tokens are to be taken next."""
        if self._wrote:
            self._blocks.computed()
            self._wrote = False
        self._scheduler.steps += 1
        self.steps -= 1
        for one in self.outputs:
            one.computed += 1


def run_after(
    plan: Sequence[ScheduledTokens],
    outputs: list[TextSequence],
    sampler: Sampler | None,
    scheduler: Scheduler,
    table: RequestTable,
) -> DecodeRun | None:
    """The run that a step begins whose plan gave these sequences a token; None where it computed anything else.

    sampler: drew these tokens.
    """
    if not len(outputs) == len(plan) == sum(entry.count for entry in plan) or not all(map(table.has, outputs)):
        return None
    return None if sampler is None else DecodeRun(outputs, sampler, scheduler, table)


def shown(output: TextSequence, token: int) -> RequestOutput:
    """A token in the middle of a text that is given out as it comes."""
    state = output.state
    return RequestOutput(
        request_id=state.request.id,
        index=output.index,
        text=output.output_text.go_on(token),
        tokens=(token,),
        prompt_tokens=output.prompt_length,
        cached_tokens=state.cached_tokens,
    )
