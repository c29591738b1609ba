"""The engine: requests in, one step of the model for all of them together, pieces of text out. One thread owns it.

A step: the scheduler plans which tokens of which sequences are computed (`Scheduler`), blocks that are written are made
private (`PagedCache.copy`), one call of the model over the ragged rows (`ScheduledBatch`), one batched draw (`draw`),
and each sample takes its token (`Sample`). Requests with several samples compute their prompt once and fork; a beam is
a fork.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.generation.generate import end_ids
from hasten.generation.paged import PagedCache
from hasten.model.tokenizer import Tokenizer
from hasten.model.transformer import Transformer
from hasten.serving import beams, embedding, prompt_scores, speculation
from hasten.serving.admission import admitted, cache_blocks, longest
from hasten.serving.batch import ScheduledBatch
from hasten.serving.blocks import BlockManager
from hasten.serving.counting import Counts, Stats
from hasten.serving.drawing import Drawn, draw
from hasten.serving.groups import SequenceGroup
from hasten.serving.in_flight import InFlight
from hasten.serving.logprobs import TokenTexts
from hasten.serving.request import EngineFailed, FinishReason, Request, RequestOutput, RequestRefused
from hasten.serving.sampler import Sampler
from hasten.serving.scheduler import Scheduler
from hasten.serving.sequences import Scheduled, StepPlan
from hasten.serving.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "Stats"]


class Engine:
    """Continues many requests at once. Every method is to be called by one thread.

    propose: None, or a function that guesses the next tokens of a sequence (speculation). Guesses are verified in one
    step and taken as far as they are what would have been drawn, so that the text does not change.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, settings: EngineSettings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.max_length = longest(model, settings)
        self.cache = PagedCache(
            model.config,
            blocks=cache_blocks(model, settings, max_length=self.max_length),
            block_size=settings.block_size,
            dtype=model.compute_dtype,
            device=model.device,
            int8=settings.int8_cache,
        )
        self.cache_bytes = self.cache.bytes
        self.blocks = BlockManager(
            blocks=self.cache.blocks, block_size=settings.block_size, prefix_cache=settings.prefix_cache
        )
        self.scheduler = Scheduler(
            self.blocks, max_sequences=settings.max_sequences, token_budget=settings.token_budget
        )
        self.eos_ids = end_ids(model)
        self.sampler = Sampler(vocab_size=model.config.vocab_size, eos_ids=self.eos_ids, device=model.device)
        self.texts = TokenTexts(tokenizer)
        self.propose: speculation.Proposer | None = None
        self.error: str | None = None  # why the engine stopped for good
        self._flight = InFlight()
        self._pending: list[RequestOutput] = []  # of aborted requests, for the next step
        self._counts = Counts()

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, room: bool = False) -> None:
        """Take a request into the queue. room: whether it has its place already.

        Raises RequestRefused if it can never be served, QueueFull if too many wait, EngineFailed after a failure.
        """
        if self.error is not None:
            raise EngineFailed(f"the engine stopped after an error and takes no requests: {self.error}")
        if not room:
            self.check_room(self.waiting)
        request = self.checked(request)
        arrival = self.scheduler.arrival()
        trunk = self.scheduler.add(
            request.prompt,
            request=arrival,
            arrival=arrival,
            priority=request.priority,
            # A cached token gives no logits: a prompt whose logits are wanted adopts nothing.
            salt=request.salt if request.prompt_logprobs is None else f"{request.salt}\0{secrets.token_hex(8)}",
            slots=request.samples,
        )
        seed = secrets.randbits(62) if request.params.seed is None else request.params.seed
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self._flight.add(SequenceGroup(request, trunk, seed=seed, deadline=deadline))
        self._counts.requests += 1
        self._counts.prompt_tokens += len(request.prompt)

    @property
    def waiting(self) -> int:
        """Requests that have not begun. (Samples that lost their blocks wait, too, but had their turn.)"""
        return sum(not sequence.begun for sequence in self.scheduler.waiting.copy())  # other threads may ask

    def check_room(self, waiting: int) -> None:
        """Raise QueueFull if so many that wait are the limit."""
        self._flight.check_room(waiting, limit=self.settings.queue_limit)

    def checked(self, request: Request) -> Request:
        """The request with its answer cut to the length there is; raises RequestRefused if it can never be served."""
        if request.id in self._flight.groups:
            raise RequestRefused(f"a request with the id {request.id!r} is in flight; ids must differ")
        return admitted(
            request,
            model=self.model,
            settings=self.settings,
            max_length=self.max_length,
            blocks=self.blocks.blocks,
        )

    def abort(self, request_id: str) -> None:
        """Give a request up: its blocks are free at once, and the next step says so. Unknown ids are ignored."""
        group = self._flight.groups.get(request_id)
        if group is not None:
            self._counts.aborted += 1
            self._pending += self._end(group, "abort", None)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._flight.groups and not self._pending

    def close(self) -> None:
        """Give up everything and let the cache go. May be called again."""
        for request_id in list(self._flight.groups):
            self.abort(request_id)
        self._pending.clear()
        self.error = self.error or "it was closed"
        if hasattr(self, "cache"):
            del self.cache

    def check(self) -> None:
        """Raise AssertionError where the books do not agree."""
        self.scheduler.check()
        self._flight.check({*self.scheduler.running, *self.scheduler.waiting})
        if not self._flight.groups:
            assert self.blocks.free == self.blocks.blocks, "blocks are held by nobody"

    def stats(self) -> Stats:
        return self._counts.stats(self.scheduler, cache_bytes=self.cache_bytes)

    def embed(self, prompt: Sequence[int], *, pooling: str = "mean") -> Tensor:
        """The model's last normalised states (C,) float32 of a prompt: their mean, or the last token's.

        Not scaled to length 1. Raises RequestRefused.
        """
        return embedding.embed(self.model, prompt, pooling=pooling, max_length=self.max_length)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One step for everybody; what it added. A step that fails ends all requests with reason "error"."""
        started = time.perf_counter()
        pieces, self._pending = self._pending, []
        pieces += self._expire()
        try:
            with torch.inference_mode():
                pieces += self._step()
            if not self._flight.groups:
                self.check()
        except Exception as error:  # whatever it was: nobody may wait for ever, and no block may be lost
            pieces += self._fail(error)
        self._counts.busy_seconds += time.perf_counter() - started
        return pieces

    def _step(self) -> list[RequestOutput]:
        """Plan, copy, compute, draw, take."""
        if self.propose is not None:
            drawing = self._flight.samples
            speculation.guess(self.propose, [drawing[s] for s in self.scheduler.running if s in drawing])
        plan = self.scheduler.plan()
        if not plan.entries:
            return []
        if plan.copies:
            self.cache.copy(plan.copies)
        batch = ScheduledBatch.of(plan, self.blocks, self._prompt_rows if self._flight.scoring else None)
        logits = self._compute(batch)
        self.scheduler.advance(plan)
        takers, scored = self._arrived(plan, batch, logits)
        pieces: list[RequestOutput] = []
        if takers:
            draw(logits, takers, self.sampler, self.texts)
            for taker in takers:
                pieces += self._take(taker)
        if scored:
            pieces += self._search(logits, scored)
        return pieces

    def _compute(self, batch: ScheduledBatch) -> Tensor:
        started = time.perf_counter()
        logits = batch.logits(self.model, self.cache)
        self._counts.model_seconds += time.perf_counter() - started
        self._counts.steps += 1
        self._counts.computed_tokens += len(batch.tokens)
        return logits

    def _arrived(self, plan: StepPlan, batch: ScheduledBatch, logits: Tensor) -> tuple[list[Drawn], list[beams.Scored]]:
        """The samples that draw a token now, and the beams that are scored. A prompt that was read becomes them."""
        takers: list[Drawn] = []
        scored: list[beams.Scored] = []
        for entry, row in zip(plan.entries, batch.first, strict=True):
            sequence = entry.sequence
            group = self._flight.group_of(sequence)
            if self._flight.scoring:
                count = prompt_scores.scored_rows(group, entry)
                prompt_scores.note(group, entry, logits[row : row + count], self.texts)
                row += count
            if not entry.complete:
                continue
            if group.trunk is sequence:
                group.sprout(self.scheduler, tokenizer=self.tokenizer, eos_ids=self.eos_ids)
                self._flight.samples |= {sample.sequence: sample for sample in group.samples}
                takers += [Drawn(group, sample, row) for sample in group.samples]
            elif group.search is None:
                takers.append(Drawn(group, self._flight.samples[sequence], row))
            if group.search is not None:
                scored.append(beams.Scored(group.search, sequence, row))
        return takers, scored

    def _prompt_rows(self, entry: Scheduled) -> int:
        return prompt_scores.scored_rows(self._flight.group_of(entry.sequence), entry)

    def _take(self, taker: Drawn) -> list[RequestOutput]:
        """A sample takes what was drawn for it."""
        group, sample = taker.group, taker.sample
        text, count = sample.take(taker.tokens, failure=taker.failure)
        tokens = taker.tokens[:count]
        self._counts.generated_tokens += count
        self.scheduler.accept(sample.sequence, tokens)
        if sample.finish_reason is not None:
            self.scheduler.finish(sample.sequence)
            del self._flight.samples[sample.sequence]
        pieces = group.told(sample, text=text, tokens=tokens, logprobs=taker.logprobs[:count])
        if sample.finish_reason is not None and group.done:
            self._complete(group, failed=sample.finish_reason == "error")
        return pieces

    def _search(self, logits: Tensor, scored: list[beams.Scored]) -> list[RequestOutput]:
        """The beams of the next step; the best texts of searches that are done."""
        generated, done = beams.advance(logits, scored, texts=self.texts, books=self.scheduler)
        self._counts.generated_tokens += generated
        pieces: list[RequestOutput] = []
        for search in done:
            group = self._flight.group_of(search.beams[0].sequence)
            pieces += group.best_beams(tokenizer=self.tokenizer, eos_ids=self.eos_ids)
            for sequence in group.sequences:
                self.scheduler.finish(sequence)
            self._complete(group)
        return pieces

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _complete(self, group: SequenceGroup, *, failed: bool = False) -> None:
        self._counts.failed += failed
        self._counts.finished += not failed
        self._flight.forget(group)

    def _expire(self) -> list[RequestOutput]:
        pieces: list[RequestOutput] = []
        for group in self._flight.expired():
            self._counts.aborted += 1
            pieces += self._end(group, "abort", "timeout")
        return pieces

    def _fail(self, error: Exception) -> list[RequestOutput]:
        self.error = f"{type(error).__name__}: {error}"
        pieces: list[RequestOutput] = []
        for group in list(self._flight.groups.values()):
            self._counts.failed += 1
            pieces += self._end(group, "error", self.error)
        self.blocks.forget()  # what was promised to be written in this step may not have been
        return pieces

    def _end(self, group: SequenceGroup, reason: FinishReason, why: str | None) -> list[RequestOutput]:
        """Stop a request from outside: its blocks back, and a last word for each of its unfinished samples."""
        for sequence in group.sequences:
            self.scheduler.finish(sequence)
            self._flight.samples.pop(sequence, None)
        self._flight.forget(group)
        return group.ended(reason, why)
