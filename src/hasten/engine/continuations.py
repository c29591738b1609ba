"""What becomes of the tokens of a step: each text takes its own, and what can be given out is."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hasten.engine.guide import Guide
from hasten.engine.layout import to_device
from hasten.engine.logprobs import TokenTexts, token_logprobs
from hasten.engine.request import FinishReason, RequestOutput, TokenLogprob
from hasten.engine.request_state import RequestState, RequestTable
from hasten.engine.run import Group, shown
from hasten.engine.sampler import Sampler
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import TextSequence
from hasten.engine.settings import Stats
from hasten.engine.speculation import Speculator
from hasten.model.sharded import broadcast_from_rank0
from hasten.model.transformer import Transformer

if TYPE_CHECKING:
    from hasten.engine.ahead import Flight
    from hasten.engine.beams import BeamSearch


class Continuations:
    """The texts of an engine, as they grow and end.

    counts: what is counted of them. sampler: of those that were drawn for last; None where tokens were drawn elsewhere
    since.
    """

    def __init__(
        self,
        model: Transformer,
        scheduler: Scheduler,
        table: RequestTable,
        *,
        eos_ids: Collection[int],
        texts: TokenTexts,
        speculator: Speculator | None,
        in_step: bool,
    ) -> None:
        """in_step: as in `ModelRunner`."""
        self.model, self.scheduler, self._table = model, scheduler, table
        self.texts, self.speculator, self.counts = texts, speculator, Stats()
        self.sampler: Sampler | None = None
        self._drawn_for: list[int] = []  # the numbers of its texts
        self._eos_ids, self._in_step = eos_ids, in_step

    def sampler_of(self, outputs: Sequence[TextSequence]) -> Sampler:
        """The sampler of these texts, laid out where the last draw was for others."""
        numbers = [one.number for one in outputs]
        if self.sampler is None or numbers != self._drawn_for:
            self._drawn_for = numbers
            self.sampler = Sampler(
                [one.params for one in outputs],
                [one.state.request.prompt if one.params.needs_history else () for one in outputs],
                [one.generated if one.params.needs_history else () for one in outputs],
                eos_ids=self._eos_ids,
                vocab_size=self.model.config.vocab_size,
                device=self.model.device,
            )
        return self.sampler

    def draw(self, logits: Tensor, growing: dict[TextSequence, int]) -> Tensor:
        """The next token of each output sequence, int64 on the device; the host does not wait for it.

        growing: as in `grow`; of outputs without drafts, constraints and log-probabilities.
        """
        outputs = list(growing)
        rows = _picked(logits, list(growing.values()))
        return self.sampler_of(outputs).next_tokens(rows, steps=[one.count for one in outputs])

    def grow(self, logits: Tensor, growing: dict[TextSequence, int]) -> list[RequestOutput]:
        """Each output sequence takes its draft as far as it is right, and one token more.

        logits (R, V) float32. growing: the row of each, behind which is one for each token of its draft.
        """
        if not growing:
            return []
        outputs, first = list(growing), list(growing.values())
        drafts = [one.drafts for one in outputs]
        rows = [row + place for row, draft in zip(first, drafts, strict=True) for place in range(1 + len(draft))]
        guide = Guide(outputs) if any(one.constraint is not None for one in outputs) else None
        drawn_from = None
        if self.speculator is not None:
            drawn_from = [self.speculator.probabilities(one.number)[: len(one.drafts)] for one in outputs]
        taken = self.sampler_of(outputs).take(
            _picked(logits, rows),
            drafts,
            steps=[one.count for one in outputs],
            guide=guide,
            probabilities=drawn_from,
        )
        failures = {} if guide is None else guide.fail(taken)
        if self.speculator is not None and self._in_step:  # only the first rank knows what drafts were drawn from
            taken = broadcast_from_rank0(self.model, taken)
        logprobs = self._logprobs(logits, growing, taken)
        for i, failure in failures.items():
            outputs[i].failure = failure
        pairs = zip(outputs, taken, strict=True)
        return [piece for one, tokens in pairs for piece in self.take(one, tokens, logprobs.get(one, ()))]

    def _logprobs(
        self, logits: Tensor, growing: dict[TextSequence, int], taken: Sequence[Sequence[int]]
    ) -> dict[TextSequence, list[TokenLogprob]]:
        """Those of the taken tokens, for the outputs that want them."""
        wanted = [
            (one, row, own) for (one, row), own in zip(growing.items(), taken, strict=True) if one.state.wants_logprobs
        ]
        if not wanted:
            return {}
        rows = [row + place for _, row, own in wanted for place in range(len(own))]
        tops = [one.state.request.logprobs or 0 for one, _, own in wanted for _ in own]
        tokens = [token for *_, own in wanted for token in own]
        found = iter(token_logprobs(_picked(logits, rows), tokens, tops=tops, texts=self.texts))
        return {one: [next(found) for _ in own] for one, _, own in wanted}

    def arrived(self, flight: Flight) -> list[RequestOutput]:
        """Wait for the tokens of a step that was launched, and take them."""
        started, tokens = time.perf_counter(), flight.drawn.wait()
        self.counts.model_seconds += time.perf_counter() - started
        return self.take_each(flight.outputs, tokens, group=flight.all_of(self._table))

    def take_each(
        self, outputs: list[TextSequence], tokens: list[int], *, group: Group | None = None
    ) -> list[RequestOutput]:
        """Each output sequence takes its token; those that have ended do not. group: these, if none is full."""
        if group is not None and (given := group.take(tokens)) is not None:
            self.counts.generated_tokens += len(tokens)
            return given
        found: list[RequestOutput] = []
        for output, token in zip(outputs, tokens, strict=True):
            if not self._table.has(output):
                continue  # it has ended: one token too many
            if not output.goes_on(token):
                found += self.take(output, [token], ())
                continue
            self.counts.generated_tokens += 1
            output.tokens.append(token)
            if not output.gathers:
                found.append(shown(output, token))
        return found

    def take(self, output: TextSequence, tokens: list[int], logprobs: Sequence[TokenLogprob]) -> list[RequestOutput]:
        """An output sequence takes what was sampled for it."""
        text, count = output.append(tokens)
        self.counts.generated_tokens += count
        if self.speculator is not None:
            self.speculator.observe(output.number, count, checked=len(output.drafts))
        tokens, logprobs = tokens[:count], logprobs[:count]
        self.scheduler.accept(output, tokens)
        if output.finish_reason is not None:
            self.scheduler.finish(output)
            self._table.end(output)
            self._forget(output)
        found = output.state.emit(output, text=text, tokens=tokens, logprobs=logprobs)
        if not output.state.unfinished:
            self._complete(output.state, failed=output.finish_reason == "error")
        return found

    def search(self, logits: Tensor, scored: dict[tuple[BeamSearch, TextSequence], int]) -> list[RequestOutput]:
        """The beams of the next step; the best texts of searches that are done."""
        if not scored:
            return []
        from hasten.engine import beams  # only where there are any

        own, rows = list(scored), list(scored.values())
        generated, done = beams.advance(logits, own, rows, texts=self.texts, scheduler=self.scheduler)
        self.counts.generated_tokens += generated
        found: list[RequestOutput] = []
        for state in (self._table.state_of(search.beams[0].sequence) for search in done):
            found += state.emit_beams()
            for sequence in state.sequences:
                self.scheduler.finish(sequence)
            self._complete(state, failed=found[-1].finish_reason == "error")
        return found

    def _forget(self, output: TextSequence) -> None:
        if self.speculator is not None:
            self.speculator.end(output.number, output.generated, salt=output.state.request.salt)

    def _complete(self, state: RequestState, *, failed: bool = False) -> None:
        self.counts.failed += failed
        self.counts.finished += not failed
        self._table.remove(state)

    def end(self, state: RequestState, reason: FinishReason, why: str | None) -> list[RequestOutput]:
        """Stop a request from outside: its blocks back, and a last word for each of its unfinished texts."""
        for sequence in state.sequences:
            self.scheduler.finish(sequence)
            if self._table.end(sequence):
                self._forget(sequence)
        found = state.emit_end(reason, why)
        self._table.remove(state)
        return found


def _picked(logits: Tensor, rows: list[int]) -> Tensor:
    """The logits of these rows; without a copy where they are all, in order."""
    return logits if rows == list(range(len(logits))) else logits[to_device(rows, logits.device)]
