"""Requests while they are served: the table of them, the state of each, and the texts that come of it."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hasten.engine.logprobs import TokenTexts, token_logprobs
from hasten.engine.request import FinishReason, Request, RequestOutput, TokenLogprob
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import ScheduledTokens, TextSequence
from hasten.engine.speculation import Speculator, Text
from hasten.engine.speculation.proposer import LIMIT
from hasten.engine.stopping import OutputText, stop_ids
from hasten.model.sharded import broadcast_from_rank0
from hasten.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hasten.engine.beams import BeamSearch
    from hasten.engine.runner import ModelRunner


def draft_text(sequence: TextSequence, stretches_at: int | None) -> Text:
    """A sample, as a speculator continues it. stretches_at: as in `ModelConfig`; a draft does not go past it."""
    room = sequence.params.max_new_tokens - sequence.count - 1
    if stretches_at is not None and not sequence.stretched:
        room = max(0, min(room, stretches_at - sequence.computed - 1))
    return Text(
        number=sequence.number,
        tokens=sequence.tokens,
        step=sequence.count,
        params=sequence.params,
        room=room,
        salt=sequence.state.request.salt,
    )


class RequestState:
    """A request from its arrival to its end: its prompt, then its output sequences or its beams.

    unfinished: the texts, by their index, that no RequestOutput has ended yet.
    """

    def __init__(
        self,
        request: Request,
        prompt: TextSequence,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: Collection[int],
    ) -> None:
        self.request = request
        self.seed = secrets.randbits(62) if request.params.seed is None else request.params.seed
        self.deadline = math.inf if request.timeout is None else time.monotonic() + request.timeout
        self.prompt: TextSequence | None = prompt  # until the output sequences are forked from it
        self.number = prompt.request
        self.outputs: list[TextSequence] = []
        self.search: BeamSearch | None = None
        self.unfinished = set(range(request.n))
        self.ranked = request.beam_width > 0 or (request.best_of or request.n) > request.n  # emitted at the end
        self.wants_logprobs = request.logprobs is not None or (self.ranked and not request.beam_width)
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt)
            prompt.scored = len(request.prompt) - 1  # the last one predicts the answer
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self.cached_tokens = 0
        self.has_begun = False  # something was given out

    def output_text(self) -> OutputText:
        """What turns the tokens of one answer into text."""
        return OutputText(
            self.request.params,
            tokenizer=self._tokenizer,
            eos_ids=self._eos_ids,
            context=self.request.prompt,
            skip_special_tokens=self.request.skip_special_tokens,
        )

    @property
    def sequences(self) -> list[TextSequence]:
        """Those that the scheduler still has."""
        if self.search is not None:
            return [beam.sequence for beam in self.search.beams]
        alive = [output for output in self.outputs if output.finish_reason is None]
        return alive if self.prompt is None else [self.prompt, *alive]

    def fork(self, scheduler: Scheduler) -> None:
        """The prompt is computed: its sequence becomes the first beam, or the output sequences by forks of it."""
        prompt, request = self.prompt, self.request
        assert prompt is not None
        self.prompt, self.cached_tokens, prompt.scored = None, prompt.cached, 0
        if request.beam_width:
            from hasten.engine.beams import BeamSearch

            self.search = BeamSearch(request, prompt, end_ids=stop_ids(request.params, eos_ids=self._eos_ids))
            return
        for index in range(request.samples):
            sequence = scheduler.fork(prompt) if index else prompt
            sequence.begin(self, index)
            self.outputs.append(sequence)

    def score_prompt(self, start: int, logits: Tensor, texts: TokenTexts) -> None:
        """Keep what the logits (R, V) float32 of the prompt's tokens from `start` on say of those that follow."""
        assert self.prompt_logprobs is not None
        following = slice(start + 1, start + 1 + len(logits))
        tops = [self.request.prompt_logprobs or 0] * len(logits)
        found = token_logprobs(logits, self.request.prompt[following], tops=tops, texts=texts)
        self.prompt_logprobs[following] = found

    # -- what is given out --------------------------------------------------------------------------------------------

    def emit(
        self, output: TextSequence, *, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> list[RequestOutput]:
        """What an output sequence took in a step; where texts are ranked, the best ones when all are complete."""
        if not self.ranked and not self.request.gathered:
            return [self._emit(output.index, output.finish_reason, output.stop_reason, text, tokens, logprobs)]
        output.text.append(text)
        output.logprobs += logprobs
        if not self.ranked:
            return [] if output.finish_reason is None else [self._emit_whole(output.index, output)]
        if any(one.finish_reason is None for one in self.outputs):
            return []
        best = sorted(self.outputs, key=lambda one: -one.mean_logprob)[: self.request.n]
        return [self._emit_whole(i, one) for i, one in enumerate(best)]

    def emit_beams(self) -> list[RequestOutput]:
        """The `n` best texts of a search that is done, whole; an error for each that it did not find."""
        assert self.search is not None
        assert self.search.done
        found = []
        for index, beam in enumerate(self.search.complete[: self.request.n]):
            output = self.output_text()
            text = "".join(output.push(token) for token in beam.tokens)
            reasons = output.finish_reason, output.stop_reason
            found.append(self._emit(index, *reasons, text, beam.tokens, beam.logprobs))
        return found + self.emit_end("error", f"the search found {len(found)} of {self.request.n} texts")

    def emit_end(self, reason: FinishReason, why: str | None) -> list[RequestOutput]:
        """A last word for each unfinished text of a request that is stopped from outside."""
        if not self.request.gathered or self.ranked or not self.outputs:
            return [self._emit(index, reason, why) for index in sorted(self.unfinished)]
        own = [self.outputs[index] for index in sorted(self.unfinished)]
        for output in own:
            output.catch_up()
            output.finish_reason, output.stop_reason = reason, why
        return [self._emit_whole(output.index, output) for output in own]

    def _emit_whole(self, index: int, own: TextSequence) -> RequestOutput:
        """All of a text that was given out in no part."""
        return self._emit(index, own.finish_reason, own.stop_reason, "".join(own.text), own.generated, own.logprobs)

    def _emit(
        self,
        index: int,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
        text: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> RequestOutput:
        if finish_reason is not None:
            self.unfinished.discard(index)
        first, self.has_begun = not self.has_begun, True
        return RequestOutput(
            request_id=self.request.id,
            index=index,
            text=text,
            tokens=tuple(tokens),
            logprobs=None if logprobs is None or self.request.logprobs is None else tuple(logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            finished=not self.unfinished,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            prompt_logprobs=tuple(self.prompt_logprobs) if first and self.prompt_logprobs is not None else None,
        )


class RequestTable:
    """Every request from its arrival to its end: by id, by number and by sequence."""

    def __init__(self) -> None:
        self.states: dict[str, RequestState] = {}
        self.outputs: set[TextSequence] = set()  # samples that grow
        self.ended = 0  # how many of them have ended
        self._by_number: dict[int, RequestState] = {}
        self._earliest_deadline = math.inf  # of those that are here, or were
        self._ends: deque[float] = deque(maxlen=32)

    def add(self, state: RequestState) -> None:
        self.states[state.request.id] = self._by_number[state.number] = state
        self._earliest_deadline = min(self._earliest_deadline, state.deadline)

    def state_of(self, sequence: TextSequence) -> RequestState:
        return self._by_number[sequence.request]

    def has(self, output: TextSequence) -> bool:
        """Whether it grows still."""
        return output in self.outputs

    def reached(
        self,
        plan: Sequence[ScheduledTokens],
        first: Sequence[int],
        logits: Tensor,
        *,
        scheduler: Scheduler,
        texts: TokenTexts,
    ) -> tuple[dict[TextSequence, int], dict[tuple[BeamSearch, TextSequence], int]]:
        """The output sequences and beams that a step brought to their last token, with the first row of each.

        first: the first row of each of the plan's entries in logits (R, V). Prompts that were read become output
        sequences or beams, and what was wanted of their own logits is kept.
        """
        growing: dict[TextSequence, int] = {}
        scored: dict[tuple[BeamSearch, TextSequence], int] = {}
        for entry, row in zip(plan, first, strict=True):
            sequence, state = entry.sequence, self.state_of(entry.sequence)
            if sequence.scored and entry.scored:
                state.score_prompt(entry.start, logits[row : row + entry.scored], texts)
                row += entry.scored
            if not entry.complete:
                continue
            if state.prompt is sequence:
                state.fork(scheduler)
                self.outputs.update(state.outputs)
                growing |= dict.fromkeys(state.outputs, row)
            elif state.search is None:
                growing[sequence] = row
            if state.search is not None:
                scored[state.search, sequence] = row
        return growing, scored

    def propose(self, speculator: Speculator, scheduler: Scheduler, runner: ModelRunner) -> None:
        """Have drafts made for the output sequences that are one token behind, or compute accepted drafts again."""
        most = 1 + LIMIT * scheduler.keeps_states
        level = [one for one in scheduler.running if one in self.outputs and 0 < len(one.tokens) - one.computed <= most]
        drafts = speculator.propose([draft_text(one, runner.model.config.stretches_at) for one in level])
        if runner.in_step and level:
            drafts = broadcast_from_rank0(runner.model, drafts)
        for one, draft in zip(level, drafts, strict=True):
            one.drafts = draft

    def end(self, sequence: TextSequence) -> bool:
        """Take a sequence out; whether it was a sample."""
        self.ended += 1
        was_there = sequence in self.outputs
        self.outputs.discard(sequence)
        return was_there

    def remove(self, state: RequestState) -> None:
        """The request is complete, or given up."""
        del self.states[state.request.id], self._by_number[state.number]
        state.outputs.clear()  # they refer to it: a cycle would stay until the collector comes
        self._ends.append(time.monotonic())

    def expired(self) -> list[RequestState]:
        """Those whose deadline has passed; all are looked at only when one may have."""
        now = time.monotonic()
        if now < self._earliest_deadline:
            return []
        later = [state.deadline for state in self.states.values() if state.deadline > now]
        self._earliest_deadline = min(later, default=math.inf)
        return [state for state in self.states.values() if state.deadline <= now]

    @property
    def pace(self) -> float:
        """Seconds from one end of a request to the next, lately: when a place in the queue should get free."""
        return (time.monotonic() - self._ends[0]) / len(self._ends) if len(self._ends) > 1 else 1.0

    def check(self, known: set[TextSequence]) -> None:
        """Raise AssertionError unless the sequences are those that the scheduler knows."""
        sequences = {sequence for state in self.states.values() for sequence in state.sequences}
        assert sequences == known, "sequences without a request"
        assert self.outputs <= sequences, "output sequences that have ended"
