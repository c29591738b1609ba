"""What becomes of the tokens of a step: each text takes its own, and what can be given out is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hasten.engine.logprobs import TokenTexts
from hasten.engine.model_runner import Sampler
from hasten.engine.request import FinishReason, RequestOutput, TokenLogprob
from hasten.engine.request_state import RequestState, RequestTable
from hasten.engine.run import Group
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import TextSequence
from hasten.engine.settings import Stats
from hasten.engine.speculation import Speculator

if TYPE_CHECKING:
    from hasten.engine.ahead import Flight
    from hasten.engine.beams import BeamSearch


class Continuations:
    """The texts of an engine, as they grow and end. counts: what is counted of them."""

    def __init__(
        self,
        sampler: Sampler,
        scheduler: Scheduler,
        table: RequestTable,
        *,
        texts: TokenTexts,
        speculator: Speculator | None,
    ) -> None:
        self.sampler, self.scheduler, self._table = sampler, scheduler, table
        self.texts, self.speculator, self.counts = texts, speculator, Stats()

    def grow(self, logits: Tensor, growing: dict[TextSequence, int]) -> list[RequestOutput]:
        """Each output sequence takes what is sampled for it, from its row on."""
        if not growing:
            return []
        owners, first = list(growing), list(growing.values())
        drawn = zip(owners, self.sampler.sample(logits, owners, first, speculator=self.speculator), strict=True)
        return [piece for one, (tokens, logprobs) in drawn for piece in self.take(one, tokens, logprobs)]

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
            found += output.take(token)
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
        self._table.remove(state)
        return state.emit_end(reason, why)
