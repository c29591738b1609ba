"""The engine: requests in, one step of the model for all of them together, pieces of text out. One thread owns it.

A step: the scheduler plans which tokens of which sequences are computed (`Scheduler`), blocks that are written are made
private (`PagedCache.copy`), one call of the model over the ragged rows, one batched draw (`Sampler`), and each sample
takes its token (`Sample`). Requests with several samples compute their prompt once and fork; a beam is a fork, too.
"""

from __future__ import annotations

import heapq
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hasten.errors import ConfigError, HastenWarning, ResourceError
from hasten.generation.generate import end_ids, fit
from hasten.generation.ids import check_ids
from hasten.generation.paged import PagedCache, Rows
from hasten.generation.stopping import OutputText, stop_ids
from hasten.machine.memory import available_memory
from hasten.model.tokenizer import Tokenizer
from hasten.model.transformer import Transformer
from hasten.serving import embedding, scheduler
from hasten.serving.beams import Beam, BeamSearch, candidates_of
from hasten.serving.blocks import BlockManager
from hasten.serving.logprobs import TokenTexts, token_logprobs
from hasten.serving.request import EngineFailed, FinishReason, Piece, QueueFull, Request, RequestRefused
from hasten.serving.sampler import Sampler
from hasten.serving.samples import Group, Sample, check_request
from hasten.serving.scheduler import Plan, Scheduled, Scheduler
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
        self.max_length = _longest(model, settings)
        self.cache = PagedCache(
            model.config,
            blocks=cache_blocks(model, settings, max_length=self.max_length),
            block_size=settings.block_size,
            dtype=model.dtype,
            device=model.device,
        )
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
        self._deadlines: list[tuple[float, str]] = []
        self._pending: list[Piece] = []  # of aborted requests, for the next step
        self._ends: deque[float] = deque(maxlen=32)
        self._owners: dict[scheduler.Sequence, Sample] = {}
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
        now = time.monotonic()
        deadline = None if request.timeout is None else now + request.timeout
        seed = secrets.randbits(62) if request.params.seed is None else request.params.seed
        group = Group(request, number=arrival, arrival=arrival, seed=seed, deadline=deadline)
        group.trunk = self.scheduler.add(
            request.prompt,
            request=arrival,
            arrival=arrival,
            priority=request.priority,
            # A cached token gives no logits: a prompt whose logits are wanted adopts nothing.
            salt=request.salt if request.prompt_logprobs is None else f"{request.salt}\0{secrets.token_hex(8)}",
            slots=request.samples,
        )
        self._groups[request.id] = self._by_number[arrival] = group
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.id))
        self._requests["requests"] += 1
        self._counts["prompt_tokens"] += len(request.prompt)

    def check_room(self, waiting: int) -> None:
        """Raise QueueFull if so many that wait are the limit."""
        if waiting >= self.settings.queue_limit:
            raise QueueFull(
                f"{waiting} requests wait already, the limit is {self.settings.queue_limit}; try again later",
                retry_after=self._retry_after(),
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
            cache_bytes=self.blocks.blocks * _block_bytes(self.model, self.settings),
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
        started = time.perf_counter()
        if plan.copies:
            self.cache.copy(plan.copies)
        logits, rows = self._forward(plan)
        self.scheduler.advance(plan)
        self._in_model += time.perf_counter() - started
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += plan.tokens
        drawn: list[tuple[Scheduled, int]] = []  # with the first of its rows
        scored: list[tuple[BeamSearch, scheduler.Sequence, int]] = []
        for entry, row in zip(plan.entries, rows, strict=True):
            group = self._by_number[entry.sequence.request]
            if group.prompt_logprobs is not None and group.trunk is entry.sequence:
                self._note_prompt(group, entry, logits, row)
            if not entry.complete:
                continue
            row += self._prompt_rows(group, entry)
            if group.trunk is entry.sequence:
                self._sprout(group)
            if group.search is not None:
                scored.append((group.search, entry.sequence, row))
            else:
                drawn.append((entry, row))
        pieces = self._draw(logits, drawn) if drawn else []
        if scored:
            pieces += self._search(logits, scored)
        return pieces

    def _forward(self, plan: Plan) -> tuple[Tensor, list[int]]:
        """Logits (R, V) of the rows that are wanted, and for each entry of the plan the first of its rows."""
        tokens: list[int] = []
        wanted: list[int] = []
        first: list[int] = []
        ragged = []
        for entry in plan.entries:
            sequence, start = entry.sequence, len(tokens)
            if entry.count == 1 and not sequence.drafts:
                tokens.append(sequence.tokens[entry.start])
            else:
                whole = sequence.tokens + sequence.drafts if sequence.drafts else sequence.tokens
                tokens += whole[entry.start : entry.end]
            first.append(len(wanted))
            group = self._by_number[sequence.request]
            if count := self._prompt_rows(group, entry):
                wanted += range(start, start + count)
            if entry.complete:
                wanted += range(len(tokens) - 1 - len(sequence.drafts), len(tokens))
            ragged.append(Rows(self.blocks.table(sequence.number), entry.start, entry.count))
        context = self.cache.step(ragged)
        device = self.model.device
        logits = self.model(
            torch.tensor([tokens], device=device),
            context.positions,
            context,
            rows=torch.tensor(wanted or [len(tokens) - 1], device=device),
        )
        return logits, first

    def _prompt_rows(self, group: Group, entry: Scheduled) -> int:
        """How many rows of the entry predict a token of a prompt whose log-probabilities are wanted."""
        if group.prompt_logprobs is None or group.trunk is not entry.sequence:
            return 0
        return min(entry.end, len(group.request.prompt) - 1) - entry.start

    def _note_prompt(self, group: Group, entry: Scheduled, logits: Tensor, row: int) -> None:
        count = self._prompt_rows(group, entry)
        assert group.prompt_logprobs is not None
        if count > 0:
            following = group.request.prompt[entry.start + 1 : entry.start + 1 + count]
            top = group.request.prompt_logprobs or 0
            found = token_logprobs(logits[row : row + count], following, tops=[top] * count, texts=self.texts)
            group.prompt_logprobs[entry.start + 1 : entry.start + 1 + count] = found

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
            sample.constraint = request.constraint
            if request.constraint is not None and request.samples > 1:
                sample.constraint = request.constraint.fork()
            group.samples.append(sample)
            self._owners[sample.sequence] = sample

    # -- samples ------------------------------------------------------------------------------------------------------

    def _draw(self, logits: Tensor, drawn: list[tuple[Scheduled, int]]) -> list[Piece]:
        """A token for each sample of the entries, several where guesses were right."""
        samples: list[Sample] = []
        steps: list[int] = []
        rows: list[int] = []
        for entry, row in drawn:
            group = self._by_number[entry.sequence.request]
            own = [self._owners[entry.sequence]]
            if not own[0].count:  # the prompt's end: all samples draw from the same row
                own = group.samples
            for sample in own:
                for i in range(1 + len(entry.sequence.drafts)):
                    samples.append(sample)
                    steps.append(sample.count + i)
                    rows.append(row + i)
        if rows != list(range(len(logits))):
            logits = logits[torch.tensor(rows, device=logits.device)]
        wanting = [i for i, sample in enumerate(samples) if self._by_number[sample.sequence.request].wants_logprobs]
        # Before the draw: a constraint masks the rows in place.
        raw = logits[torch.tensor(wanting, device=logits.device)] if wanting else None
        tokens = self.sampler.draw(logits, samples, steps)
        found = {}
        if raw is not None:
            tops = [self._by_number[samples[i].sequence.request].request.logprobs or 0 for i in wanting]
            told = token_logprobs(raw, [tokens[i] for i in wanting], tops=tops, texts=self.texts)
            found = dict(zip(wanting, told, strict=True))
        pieces: list[Piece] = []
        i = 0
        while i < len(samples):
            sample = samples[i]
            taken = 1
            drafts = sample.sequence.drafts
            while taken <= len(drafts) and drafts[taken - 1] == tokens[i + taken - 1]:
                taken += 1
            following = i + 1 + len(drafts)
            pieces += self._take(
                sample,
                tokens[i : i + taken],
                [found[place] for place in range(i, i + taken)] if i in found else None,
                failure=self.sampler.failures.get(i),
            )
            i = following
        return pieces

    def _take(self, sample: Sample, tokens: list[int], logprobs: list | None, *, failure: str | None) -> list[Piece]:
        group = self._by_number[sample.sequence.request]
        text, count = "", 0
        try:
            if failure is not None:
                raise ConfigError(failure)
            for token in tokens:
                count += 1
                text += sample.push(token)
                if sample.finish_reason is not None:
                    break
        except Exception as error:  # a constraint that came with the request: its failure, not the engine's
            sample.end("error", str(error))
        tokens = tokens[:count]
        self._counts["generated_tokens"] += count
        if sample.finish_reason is None:
            self.scheduler.accept(sample.sequence, tokens)
        else:
            sample.sequence.tokens += tokens
            self.scheduler.finish(sample.sequence)
            del self._owners[sample.sequence]
        if logprobs is not None and group.held:
            sample.total_logprob += sum(told.logprob for told in logprobs[:count])
        if group.held:
            sample.text.append(text)
            sample.logprobs += (logprobs or [])[:count]
            pieces = group.best() if group.done else []
        else:
            pieces = [
                group.piece(
                    sample.index,
                    text=text,
                    tokens=tuple(tokens),
                    logprobs=None if logprobs is None else tuple(logprobs[:count]),
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
                pieces += self._next_beams(search)
        return pieces

    def _next_beams(self, search: BeamSearch) -> list[Piece]:
        group = self._by_number[search.beams[0].sequence.request]
        choices = search.choose(self.texts)
        self._counts["generated_tokens"] += len(choices)
        if search.done:
            return self._best_beams(group, search)
        continued = {choice.parent for choice in choices}
        for beam in search.beams:
            if beam not in continued:
                self.scheduler.finish(beam.sequence)
        beams: list[Beam] = []
        for choice in choices:
            first = choice.parent in continued
            continued.discard(choice.parent)
            sequence = choice.parent.sequence if first else self.scheduler.fork(choice.parent.sequence)
            beams.append(Beam(sequence, choice.score, (*choice.parent.logprobs, choice.logprob)))
        for beam, choice in zip(beams, choices, strict=True):  # after all forks
            self.scheduler.accept(beam.sequence, [choice.token])
        search.continued(beams)
        return []

    def _best_beams(self, group: Group, search: BeamSearch) -> list[Piece]:
        pieces = []
        for index, text in enumerate(search.complete[: group.request.n]):
            output = OutputText(
                group.request.params,
                tokenizer=self.tokenizer,
                eos_ids=self.eos_ids,
                context=group.request.prompt,
                skip_special_tokens=group.request.skip_special_tokens,
            )
            shown = "".join(output.push(token).text for token in text.tokens)
            pieces.append(
                group.piece(
                    index,
                    text=shown,
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
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
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
        """Stop a request from outside: what its unfinished samples have to say, and their blocks back."""
        for sequence in group.sequences:
            self.scheduler.finish(sequence)
            self._owners.pop(sequence, None)
        ended = {s.index for s in group.samples if s.finish_reason is not None} if not group.held else set()
        self._forget(group)
        return [
            group.piece(index, finish_reason=reason, stop_reason=why)
            for index in range(group.request.n)
            if index not in ended
        ]

    def _forget(self, group: Group) -> None:
        del self._groups[group.request.id], self._by_number[group.number]
        self._ends.append(time.monotonic())

    def _retry_after(self) -> float:
        """Seconds in which a place in the queue should get free, by how fast the last requests ended."""
        if len(self._ends) < 2:
            return 1.0
        return max(1.0, (time.monotonic() - self._ends[0]) / len(self._ends))

    # -- checks -------------------------------------------------------------------------------------------------------

    def checked(self, request: Request) -> Request:
        """The request with its length cut to the model's; raises RequestRefused."""
        import dataclasses

        settings, blocks = self.settings, self.blocks
        try:
            check_request(request, vocab_size=self.model.config.vocab_size, has_tokenizer=self.tokenizer is not None)
            check_ids(self.model, request.prompt)
            params = fit(request.params, len(request.prompt), self.model)
        except ConfigError as error:
            raise RequestRefused(str(error)) from error
        prompt = len(request.prompt)
        if request.id in self._groups:
            raise RequestRefused(f"a request with the id {request.id!r} is in flight; ids must differ")
        if not prompt:
            raise RequestRefused("the prompt has no tokens; give at least one")
        if request.samples > settings.max_sequences:
            raise RequestRefused(
                f"{request.samples} samples or beams were asked for; the engine runs {settings.max_sequences} at most"
            )
        if prompt >= self.max_length:
            raise RequestRefused(
                f"the prompt has {prompt} tokens; prompt and answer may have {self.max_length} together"
            )
        if prompt + params.max_new_tokens > self.max_length:
            left = self.max_length - prompt
            params = dataclasses.replace(params, max_new_tokens=left, min_new_tokens=min(params.min_new_tokens, left))
        # The last token's keys are never needed.
        length = prompt + params.max_new_tokens - 1
        needed = -(-length // blocks.block_size)
        if request.beam_width:  # beams need each other: all of them at once
            common = prompt // blocks.block_size if settings.prefix_cache else 0
            needed = common + request.beam_width * (needed - common)
        if needed > blocks.blocks:
            raise RequestRefused(
                f"{prompt} tokens of prompt and {params.max_new_tokens} of answer need {needed} blocks of "
                f"{blocks.block_size} tokens; the cache has {blocks.blocks}: ask for less, or enlarge the cache"
            )
        return dataclasses.replace(request, params=params)

    def _guess(self, propose: Proposer) -> None:
        for sequence in self.scheduler.running:
            owner = self._owners.get(sequence)
            if owner is None or sequence.target - sequence.computed != 1:
                continue
            if owner.constraint is not None or owner.params.needs_history:
                continue  # each of their draws depends on the one before
            room = owner.params.max_new_tokens - owner.count - 1
            sequence.drafts = list(propose(sequence))[: max(0, room)]

    # -- embeddings ---------------------------------------------------------------------------------------------------

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


def cache_blocks(model: Transformer, settings: EngineSettings, *, max_length: int) -> int:
    """How many blocks the cache gets: what all sequences could need, or as many as the memory allows."""
    size = _block_bytes(model, settings)
    most = settings.max_sequences * -(-max_length // settings.block_size)
    if settings.cache_bytes is not None:
        allowed, whence = settings.cache_bytes, "cache_bytes"
    else:
        free = available_memory(model.device)
        allowed, whence = int(free * settings.cache_share), f"{settings.cache_share:.0%} of the free memory"
    if allowed < size:
        raise ResourceError(f"{whence} is {allowed:,} bytes; one block of {settings.block_size} tokens takes {size:,}")
    return min(most, allowed // size)


def _block_bytes(model: Transformer, settings: EngineSettings) -> int:
    return PagedCache.bytes_per_block(model.config, block_size=settings.block_size, dtype=model.dtype)


def _longest(model: Transformer, settings: EngineSettings) -> int:
    """Tokens that prompt and answer may have together."""
    longest = model.config.max_positions
    stretched = [rope.original_positions for rope in model.config.ropes if rope.scaling == "longrope"]
    if stretched and min(stretched) < longest:
        # Beyond, all keys of a sequence would have to be computed anew with other frequencies.
        longest = min(stretched)
        warnings.warn(
            f"this model changes its rotary frequencies at {longest} tokens, which the engine does not follow: prompt "
            f"and answer may have {longest} tokens together (hasten.generate goes further)",
            HastenWarning,
            stacklevel=3,
        )
    return min(longest, settings.max_length or longest)
