"""Requests while they are served: the table of them, the state of each, and the texts that come of it."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence

from torch import Tensor

from hasten.engine.beams import BeamSearch
from hasten.engine.logprobs import TokenTexts, token_logprobs
from hasten.engine.params import SamplingParams
from hasten.engine.request import Constraint, FinishReason, Request, RequestOutput, TokenLogprob
from hasten.engine.sampler import DrawnRow
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import ScheduledSequence, ScheduledTokens
from hasten.engine.speculation import Text
from hasten.engine.stopping import OutputText, stop_ids
from hasten.errors import ConfigError
from hasten.text.tokenizer import Tokenizer

_SEEDS = 2**63


class OutputSequence:
    """One of the texts of a request: its tokens (in the scheduler's sequence), its text, and why it ended."""

    def __init__(self, state: RequestState, *, index: int, sequence: ScheduledSequence) -> None:
        request = state.request
        self.state, self.index, self.sequence = state, index, sequence
        self.params: SamplingParams = request.params.with_seed((state.seed + index) % _SEEDS)
        self.constraint: Constraint | None = request.constraint
        if request.constraint is not None and request.samples > 1:
            self.constraint = request.constraint.fork()
        # Sampled by an argmax of the logits as they are, unless the minimum is still ahead.
        params = self.params
        self.plain = params.greedy and not params.logit_bias and not params.needs_history and self.constraint is None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.text: list[str] = []  # of all steps, where it is given out at the end
        self.logprobs: list[TokenLogprob] = []
        self.row: DrawnRow | None = None  # how its tokens are drawn on the device
        self._output = state.output_text()
        self._begin = len(request.prompt)
        self.gathers = request.gathered  # given out at its end
        # What `goes_on` looks at: the ids that end it, and how many tokens sequence and answer may have.
        self.end_ids = self._output.stop_ids
        self.full = self._begin + params.max_new_tokens

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return len(self.sequence.tokens) - self._begin

    @property
    def only_ids_end_it(self) -> bool:
        """Whether nothing but `end_ids` and its length ends it, and it gives out nothing but tokens and text."""
        state = self.state
        if state.ranked or state.wants_logprobs or self.constraint is not None or self.params.stop:
            return False
        return self.gathers or state.has_begun

    @property
    def generated(self) -> list[int]:
        return self.sequence.tokens[len(self.state.request.prompt) :]

    @property
    def draft_text(self) -> Text:
        """What a speculator continues."""
        return Text(
            number=self.sequence.number,
            tokens=self.sequence.tokens,
            step=self.count,
            params=self.params,
            room=self.params.max_new_tokens - self.count - 1,
            salt=self.state.request.salt,
        )

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs) / max(1, self.count)

    def append(self, tokens: Sequence[int], *, failure: str | None = None) -> tuple[str, int]:
        """Take sampled tokens until one ends the text; the text that can be shown now, and how many were taken.

        failure: why the constraint allows nothing, if so. A constraint that fails or raises ends this text alone.
        """
        self.catch_up()
        text, count = "", 0
        try:
            if failure is not None:
                raise ConfigError(failure)
            for token in tokens:
                count += 1
                text += self._append(token)
                if self.finish_reason is not None:
                    break
        except Exception as error:  # a constraint that came with the request: its failure, not the engine's
            self.finish_reason, self.stop_reason = "error", str(error)
        return text, count

    def goes_on(self, token: int) -> bool:
        """Whether this token does not end it, and nothing but text comes of it."""
        return self.only_ids_end_it and token not in self.end_ids and len(self.sequence.tokens) + 1 < self.full

    def take(self, token: int) -> list[RequestOutput]:
        """Take a token with which it `goes_on`; what is given out."""
        self.sequence.tokens.append(token)
        return [] if self.gathers else [self.show(token)]

    def show(self, token: int) -> RequestOutput:
        """A token in the middle of a text that is given out as it comes."""
        state = self.state
        return RequestOutput(
            request_id=state.request.id,
            index=self.index,
            text=self._output.go_on(token),
            tokens=(token,),
            prompt_tokens=self._begin,
            cached_tokens=state.cached_tokens,
        )

    def catch_up(self) -> None:
        """Decode the tokens that were taken and not given out."""
        known = self._begin + self._output.count
        if known < len(self.sequence.tokens):
            self.text += [self._output.go_on(token) for token in self.sequence.tokens[known:]]

    def _append(self, token: int) -> str:
        output = self._output
        text = output.push(token)
        if self.constraint is not None and output.finish_reason is None:
            self.constraint.advance(token)
            if self.constraint.done:
                text += output.finish("stop")
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return text


class RequestState:
    """A request from its arrival to its end: its prompt, then its output sequences or its beams.

    unfinished: the texts, by their index, that no RequestOutput has ended yet.
    """

    def __init__(
        self,
        request: Request,
        prompt: ScheduledSequence,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: Collection[int],
    ) -> None:
        self.request = request
        self.seed = secrets.randbits(62) if request.params.seed is None else request.params.seed
        self.deadline = math.inf if request.timeout is None else time.monotonic() + request.timeout
        self.prompt: ScheduledSequence | None = prompt  # until the output sequences are forked from it
        self.number = prompt.request
        self.outputs: list[OutputSequence] = []
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
    def sequences(self) -> list[ScheduledSequence]:
        """Those that the scheduler still has."""
        if self.search is not None:
            return [beam.sequence for beam in self.search.beams]
        alive = [output.sequence for output in self.outputs if output.finish_reason is None]
        return alive if self.prompt is None else [self.prompt, *alive]

    def fork(self, scheduler: Scheduler) -> None:
        """The prompt is computed: its sequence becomes the first beam, or the output sequences by forks of it."""
        prompt, request = self.prompt, self.request
        assert prompt is not None
        self.prompt, self.cached_tokens, prompt.scored = None, prompt.cached, 0
        if request.beam_width:
            self.search = BeamSearch(request, prompt, end_ids=stop_ids(request.params, eos_ids=self._eos_ids))
            return
        for index in range(request.samples):
            sequence = scheduler.fork(prompt) if index else prompt
            self.outputs.append(OutputSequence(self, index=index, sequence=sequence))

    def score_prompt(self, start: int, logits: Tensor, texts: TokenTexts) -> None:
        """Keep what the logits (R, V) float32 of the prompt's tokens from `start` on say of those that follow."""
        assert self.prompt_logprobs is not None
        following = slice(start + 1, start + 1 + len(logits))
        tops = [self.request.prompt_logprobs or 0] * len(logits)
        found = token_logprobs(logits, self.request.prompt[following], tops=tops, texts=texts)
        self.prompt_logprobs[following] = found

    # -- what is given out --------------------------------------------------------------------------------------------

    def emit(
        self, output: OutputSequence, *, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
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

    def _emit_whole(self, index: int, own: OutputSequence) -> RequestOutput:
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
        self.outputs: dict[ScheduledSequence, OutputSequence] = {}  # that grow; prompts and beams have none
        self.ended = 0  # how many of them have ended
        self._by_number: dict[int, RequestState] = {}
        self._earliest_deadline = math.inf  # of those that are here, or were
        self._ends: deque[float] = deque(maxlen=32)

    def add(self, state: RequestState) -> None:
        self.states[state.request.id] = self._by_number[state.number] = state
        self._earliest_deadline = min(self._earliest_deadline, state.deadline)

    def state_of(self, sequence: ScheduledSequence) -> RequestState:
        return self._by_number[sequence.request]

    def has(self, output: OutputSequence) -> bool:
        """Whether it grows still."""
        return self.outputs.get(output.sequence) is output

    def reached(
        self,
        plan: Sequence[ScheduledTokens],
        first: Sequence[int],
        logits: Tensor,
        *,
        scheduler: Scheduler,
        texts: TokenTexts,
    ) -> tuple[dict[OutputSequence, int], dict[tuple[BeamSearch, ScheduledSequence], int]]:
        """The output sequences and beams that a step brought to their last token, with the first row of each.

        first: the first row of each of the plan's entries in logits (R, V). Prompts that were read become output
        sequences or beams, and what was wanted of their own logits is kept.
        """
        growing: dict[OutputSequence, int] = {}
        scored: dict[tuple[BeamSearch, ScheduledSequence], int] = {}
        for entry, row in zip(plan, first, strict=True):
            sequence, state = entry.sequence, self.state_of(entry.sequence)
            if sequence.scored and entry.scored:
                state.score_prompt(entry.start, logits[row : row + entry.scored], texts)
                row += entry.scored
            if not entry.complete:
                continue
            if state.prompt is sequence:
                state.fork(scheduler)
                self.outputs |= {output.sequence: output for output in state.outputs}
                growing |= dict.fromkeys(state.outputs, row)
            elif state.search is None:
                growing[self.outputs[sequence]] = row
            if state.search is not None:
                scored[state.search, sequence] = row
        return growing, scored

    def end(self, sequence: ScheduledSequence) -> OutputSequence | None:
        """Take out the output sequence that a sequence is, if it is one."""
        self.ended += 1
        return self.outputs.pop(sequence, None)

    def remove(self, state: RequestState) -> None:
        """The request is complete, or given up."""
        del self.states[state.request.id], self._by_number[state.number]
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

    def check(self, known: set[ScheduledSequence]) -> None:
        """Raise AssertionError unless the sequences are those that the scheduler knows."""
        sequences = {sequence for state in self.states.values() for sequence in state.sequences}
        assert sequences == known, "sequences without a request"
        assert set(self.outputs) <= sequences, "output sequences that have ended"
