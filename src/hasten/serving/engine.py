"""The engine: requests in, one step of the model for all of them together, pieces of text out. One thread owns it.

A step: the scheduler plans which tokens of which sequences are computed (`Scheduler`), blocks that are written are made
private (`PagedCache.copy`), one call of the model over the ragged rows (`Batch`), one batched draw (`draw`), and each
sample takes its token (`Sample`). Requests with several samples compute their prompt once and fork; a beam is a fork.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.generation.generate import end_ids
from hasten.generation.ids import check_ids
from hasten.generation.paged import PagedCache
from hasten.generation.stopping import OutputText, stop_ids
from hasten.model.tokenizer import Tokenizer
from hasten.model.transformer import Transformer
from hasten.serving import embedding, scheduler
from hasten.serving.admission import admitted, cache_blocks, longest
from hasten.serving.batch import Batch
from hasten.serving.beams import BeamSearch, candidates_of, continue_beams
from hasten.serving.blocks import BlockManager
from hasten.serving.drawing import Drawn, draw
from hasten.serving.logprobs import TokenTexts, token_logprobs
from hasten.serving.request import EngineFailed, FinishReason, Piece, QueueFull, Request, RequestRefused
from hasten.serving.sampler import Sampler
from hasten.serving.samples import Group, Sample
from hasten.serving.scheduler import Scheduled, Scheduler
from hasten.serving.settings import EngineSettings, Stats

__all__ = ["Engine", "EngineSettings", "Stats"]

# A guess at the next tokens of a sequence that is about to draw one; see `Engine.propose`.
Proposer = Callable[[scheduler.Sequence], Sequence[int]]


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
            dtype=model.dtype,
            device=model.device,
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
        self.propose: Proposer | None = None
        self.error: str | None = None  # why the engine stopped for good
        self._groups: dict[str, Group] = {}
        self._by_number: dict[int, Group] = {}
        self._owners: dict[scheduler.Sequence, Sample] = {}
        self._scoring_prompts = 0  # requests in flight that want their prompt's log-probabilities
        self._deadlines: list[tuple[float, str]] = []
        self._pending: list[Piece] = []  # of aborted requests, for the next step
        self._ends: deque[float] = deque(maxlen=32)
        self._counts = dict.fromkeys(("steps", "prompt_tokens", "generated_tokens", "computed_tokens"), 0)
        self._requests = dict.fromkeys(("requests", "finished", "aborted", "failed"), 0)
        self._busy = self._in_model = 0.0

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request into the queue.

        Raises RequestRefused if it can never be served, QueueFull if too many wait, EngineFailed after a failure.
        """
        if self.error is not None:
            raise EngineFailed(f"the engine stopped after an error and takes no requests: {self.error}")
        self.check_room(len(self.scheduler.waiting))
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
        self._groups[request.id] = self._by_number[arrival] = Group(request, trunk, seed=seed, deadline=deadline)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.id))
        self._scoring_prompts += request.prompt_logprobs is not None
        self._requests["requests"] += 1
        self._counts["prompt_tokens"] += len(request.prompt)

    def check_room(self, waiting: int) -> None:
        """Raise QueueFull if so many that wait are the limit."""
        if waiting >= self.settings.queue_limit:
            pace = (time.monotonic() - self._ends[0]) / len(self._ends) if len(self._ends) > 1 else 1.0
            raise QueueFull(
                f"{waiting} requests wait already, the limit is {self.settings.queue_limit}; try again later",
                retry_after=max(1.0, pace),  # when a place should get free, by how fast the last requests ended
            )

    def checked(self, request: Request) -> Request:
        """The request with its answer cut to the length there is; raises RequestRefused if it can never be served."""
        if request.id in self._groups:
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
        group = self._groups.get(request_id)
        if group is not None:
            self._requests["aborted"] += 1
            self._pending += self._end(group, "abort", None)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._groups and not self._pending

    def close(self) -> None:
        """Give up everything and let the cache go."""
        for request_id in list(self._groups):
            self.abort(request_id)
        self._pending.clear()
        self.error = self.error or "it was closed"
        del self.cache

    def check(self) -> None:
        """Raise AssertionError where the books do not agree."""
        self.scheduler.check()
        sequences = {sequence for group in self._groups.values() for sequence in group.sequences}
        assert sequences == {*self.scheduler.running, *self.scheduler.waiting}, "sequences without a request"
        assert set(self._owners) <= sequences, "samples without a sequence"
        if not self._groups:
            assert self.blocks.free == self.blocks.blocks, "blocks are held by nobody"

    def stats(self) -> Stats:
        books = self.blocks.stats
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks=self.blocks.blocks,
            free_blocks=self.blocks.free,
            cache_usage=1 - self.blocks.free / self.blocks.blocks,
            cache_bytes=self.cache_bytes,
            prefix_queries=books.queries,
            prefix_hits=books.hits,
            preemptions=self.scheduler.preemptions,
            copied_blocks=books.copies,
            shared_blocks=books.shared,
            blocks_saved=books.saved,
            busy_seconds=self._busy,
            model_seconds=self._in_model,
            **self._counts,
            **self._requests,
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Piece]:
        """One step for everybody; what it added. A step that fails ends all requests with reason "error"."""
        started = time.perf_counter()
        pieces, self._pending = self._pending, []
        pieces += self._expire()
        try:
            with torch.inference_mode():
                pieces += self._step()
            if not self._groups:
                self.check()
        except Exception as error:  # whatever it was: nobody may wait for ever, and no block may be lost
            pieces += self._fail(error)
        self._busy += time.perf_counter() - started
        return pieces

    def _step(self) -> list[Piece]:
        if self.propose is not None:
            self._guess(self.propose)
        plan = self.scheduler.plan()
        if not plan.entries:
            return []
        if plan.copies:
            self.cache.copy(plan.copies)
        batch = Batch.of(plan, self.blocks, self._prompt_rows if self._scoring_prompts else None)
        started = time.perf_counter()
        logits = batch.logits(self.model, self.cache)
        self._in_model += time.perf_counter() - started
        self.scheduler.advance(plan)
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += len(batch.tokens)
        takers: list[Drawn] = []
        scored: list[tuple[BeamSearch, scheduler.Sequence, int]] = []
        for entry, row in zip(plan.entries, batch.first, strict=True):
            sequence = entry.sequence
            group = self._by_number[sequence.request]
            if self._scoring_prompts:
                row += self._note_prompt(group, entry, logits, row)
            if not entry.complete:
                continue
            if group.trunk is sequence:
                self._sprout(group)
                takers += [Drawn(group, sample, row) for sample in group.samples]
            elif group.search is None:
                takers.append(Drawn(group, self._owners[sequence], row))
            if group.search is not None:
                scored.append((group.search, sequence, row))
        pieces: list[Piece] = []
        if takers:
            draw(logits, takers, self.sampler, self.texts)
            for taker in takers:
                pieces += self._take(taker)
        if scored:
            pieces += self._search(logits, scored)
        return pieces

    def _prompt_rows(self, entry: Scheduled) -> int:
        """How many rows of the entry predict a token of a prompt whose log-probabilities are wanted."""
        group = self._by_number[entry.sequence.request]
        if group.prompt_logprobs is None or group.trunk is not entry.sequence:
            return 0
        return max(0, min(entry.end, len(group.request.prompt) - 1) - entry.start)

    def _note_prompt(self, group: Group, entry: Scheduled, logits: Tensor, row: int) -> int:
        count = self._prompt_rows(entry)
        if count:
            assert group.prompt_logprobs is not None
            following = slice(entry.start + 1, entry.start + 1 + count)
            tops = [group.request.prompt_logprobs or 0] * count
            tokens = group.request.prompt[following]
            group.prompt_logprobs[following] = token_logprobs(
                logits[row : row + count], tokens, tops=tops, texts=self.texts
            )
        return count

    def _sprout(self, group: Group) -> None:
        """The prompt is computed: one sequence becomes the samples, or the first beam."""
        trunk, request = group.trunk, group.request
        assert trunk is not None
        group.trunk, group.cached = None, trunk.cached
        if request.beam_width:
            group.search = BeamSearch(request, trunk, end_ids=stop_ids(request.params, eos_ids=self.eos_ids))
            return
        for index in range(request.samples):
            sample = Sample(
                request,
                index=index,
                sequence=trunk if index == 0 else self.scheduler.fork(trunk),
                seed=group.seed,
                tokenizer=self.tokenizer,
                eos_ids=self.eos_ids,
            )
            group.samples.append(sample)
            self._owners[sample.sequence] = sample

    def _take(self, taker: Drawn) -> list[Piece]:
        """A sample takes what was drawn for it."""
        group, sample = taker.group, taker.sample
        text, count = "", 0
        try:
            if taker.failure is not None:
                raise ConfigError(taker.failure)
            for token in taker.tokens:
                count += 1
                text += sample.push(token)
                if sample.finish_reason is not None:
                    break
        except Exception as error:  # a constraint that came with the request: its failure, not the engine's
            sample.end("error", str(error))
        tokens = taker.tokens[:count]
        self._counts["generated_tokens"] += count
        self.scheduler.accept(sample.sequence, tokens)
        if sample.finish_reason is not None:
            self.scheduler.finish(sample.sequence)
            del self._owners[sample.sequence]
        if group.held:
            sample.keep(text, taker.logprobs[:count])
            pieces = group.best() if group.done else []
        else:
            pieces = [
                group.piece(
                    sample.index,
                    text=text,
                    tokens=tuple(tokens),
                    logprobs=tuple(taker.logprobs[:count]),
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                )
            ]
        if sample.finish_reason is not None and group.done:
            self._requests["failed" if sample.finish_reason == "error" else "finished"] += 1
            self._forget(group)
        return pieces

    # -- beams --------------------------------------------------------------------------------------------------------

    def _search(self, logits: Tensor, scored: list[tuple[BeamSearch, scheduler.Sequence, int]]) -> list[Piece]:
        rows = torch.tensor([row for _, _, row in scored], device=logits.device)
        found = candidates_of(logits[rows], [search for search, _, _ in scored])
        for (search, sequence, _), candidates in zip(scored, found, strict=True):
            search.score(sequence, candidates)
        pieces: list[Piece] = []
        for search in dict.fromkeys(search for search, _, _ in scored):
            if search.ready:
                choices = search.choose(self.texts)
                self._counts["generated_tokens"] += len(choices)
                if search.done:
                    pieces += self._best_beams(search)
                else:
                    continue_beams(search, choices, self.scheduler)
        return pieces

    def _best_beams(self, search: BeamSearch) -> list[Piece]:
        group = self._by_number[search.beams[0].sequence.request]
        pieces = []
        for index, text in enumerate(search.complete[: group.request.n]):
            output = OutputText(
                group.request.params,
                tokenizer=self.tokenizer,
                eos_ids=self.eos_ids,
                context=group.request.prompt,
                skip_special_tokens=group.request.skip_special_tokens,
            )
            pieces.append(
                group.piece(
                    index,
                    text="".join(output.push(token).text for token in text.tokens),
                    tokens=text.tokens,
                    logprobs=text.logprobs,
                    finish_reason=text.finish_reason,
                    stop_reason=output.stop_reason,
                )
            )
        for beam in search.beams:
            self.scheduler.finish(beam.sequence)
        self._requests["finished"] += 1
        self._forget(group)
        return pieces

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _expire(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            deadline, request_id = heapq.heappop(self._deadlines)
            group = self._groups.get(request_id)
            if group is not None and group.deadline == deadline:
                self._requests["aborted"] += 1
                pieces += self._end(group, "abort", "timeout")
        return pieces

    def _fail(self, error: Exception) -> list[Piece]:
        self.error = f"{type(error).__name__}: {error}"
        pieces: list[Piece] = []
        for group in list(self._groups.values()):
            self._requests["failed"] += 1
            pieces += self._end(group, "error", self.error)
        self.blocks.forget()  # what was promised to be written in this step may not have been
        return pieces

    def _end(self, group: Group, reason: FinishReason, why: str | None) -> list[Piece]:
        """Stop a request from outside: its blocks back, and a last word for each of its unfinished samples."""
        for sequence in group.sequences:
            self.scheduler.finish(sequence)
            self._owners.pop(sequence, None)
        ended = set() if group.held else {s.index for s in group.samples if s.finish_reason is not None}
        self._forget(group)
        open_samples = [index for index in range(group.request.n) if index not in ended]
        return [group.piece(index, finish_reason=reason, stop_reason=why) for index in open_samples]

    def _forget(self, group: Group) -> None:
        del self._groups[group.request.id], self._by_number[group.number]
        self._scoring_prompts -= group.prompt_logprobs is not None
        self._ends.append(time.monotonic())

    # -- what else it can do ------------------------------------------------------------------------------------------

    def _guess(self, propose: Proposer) -> None:
        for sequence in self.scheduler.running:
            owner = self._owners.get(sequence)
            if owner is None or len(sequence.tokens) - sequence.computed != 1:
                continue
            if owner.constraint is not None or owner.params.needs_history:
                continue  # each of their draws depends on the one before
            room = owner.params.max_new_tokens - owner.count - 1
            sequence.drafts = list(propose(sequence))[: max(0, room)]

    def embed(self, prompt: Sequence[int], *, pooling: str = "mean") -> Tensor:
        """The model's last normalised states (C,) float32 of a prompt: their mean, or the last token's.

        Not scaled to length 1. Raises RequestRefused.
        """
        if pooling not in ("mean", "last"):
            raise RequestRefused(f"pooling is {pooling!r:.40}; it must be 'mean' or 'last'")
        try:
            check_ids(self.model, prompt)
        except ConfigError as error:
            raise RequestRefused(str(error)) from error
        if not 0 < len(prompt) <= self.max_length:
            raise RequestRefused(f"the text has {len(prompt)} tokens; it must have from 1 to {self.max_length}")
        return embedding.embed(self.model, prompt, pooling=pooling)
