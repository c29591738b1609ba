"""The engine: requests in, one step of the model for all of them together, pieces of text out. One thread owns it.

A step: the scheduler plans which tokens of which sequences are computed (`Scheduler`), blocks that are written are made
private (`KVCache.copy`), one call of the model over the ragged rows (`model_runner.step_logits`), one batched draw
(`Sampler.sample`), and each output sequence takes its tokens (`TextSequence.append`). While the same sequences take
one token each, a step skips the plan and writes only what changed (`DecodeRun`). Requests with several samples compute
their prompt once and fork; a beam is a fork.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.engine import beams
from hasten.engine.admission import AdapterNumbers, admitted, cache_blocks, check_room, longest, most_blocks
from hasten.engine.ahead import Ahead, Flight
from hasten.engine.beams import BeamSearch
from hasten.engine.blocks import BlockManager
from hasten.engine.following import runner_of
from hasten.engine.logprobs import TokenTexts
from hasten.engine.model_runner import Sampler, embed, step_logits
from hasten.engine.prompts import end_ids
from hasten.engine.request import EngineFailed, FinishReason, Request, RequestOutput, RequestRefused, TokenLogprob
from hasten.engine.request_state import RequestState, RequestTable, draft_text
from hasten.engine.run import DecodeRun, Group, run_after
from hasten.engine.scheduler import Scheduler
from hasten.engine.sequence import TextSequence
from hasten.engine.settings import EngineSettings, ModelFacts, Stats
from hasten.engine.speculation import Speculator
from hasten.engine.statistics import facts_of, stats_of
from hasten.model.transformer import Transformer
from hasten.planning.cost import parameters
from hasten.text.tokenizer import Tokenizer


class Engine:
    """Continues many requests at once. Every method is to be called by one thread, unless it says otherwise.

    speculator: None, or what proposes the next tokens of sequences. Drafts are checked in one step and taken as far as
    they are what would have been drawn, so that the text does not change. adapters: the names of the model's, in order.
    secret: of the keys of its blocks (`BlockManager`).
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        settings: EngineSettings,
        *,
        speculator: Speculator | None = None,
        adapters: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        settings = settings.on(model.device.type, weights=parameters(model.config).active)
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.adapters = AdapterNumbers(adapters)
        self.max_length = longest(model, settings)
        blocks = cache_blocks(model, settings, max_length=self.max_length)
        self.runner = runner_of(model, settings, blocks=blocks, max_length=self.max_length)
        self.cache_bytes = self.runner.cache.bytes
        if settings.fit and most_blocks(model, settings, self.max_length) > blocks:
            self.max_length = min(self.max_length, blocks * settings.block_size)
        self.blocks = BlockManager(
            blocks=blocks,
            block_size=settings.block_size,
            prefix_cache=settings.prefix_cache,
            reach=model.config.reach,
            secret=secret,
        )
        self.scheduler = Scheduler(self.blocks, max_sequences=settings.max_sequences, token_budget=settings.budget)
        self.eos_ids = end_ids(model)
        self.texts = TokenTexts(tokenizer)
        self.sampler = Sampler(
            vocab_size=model.config.vocab_size, eos_ids=self.eos_ids, texts=self.texts, device=model.device
        )
        self.speculator = speculator
        self._table = RequestTable()
        self.ahead: Ahead | None = None
        if self.runner.decoder is not None:
            self.ahead = Ahead(self.runner, self.scheduler, self._table)
        self._run: DecodeRun | None = None  # of the sequences that the last step gave a token each
        self.error: str | None = None  # why the engine stopped for good
        self._pending: list[RequestOutput] = []  # of aborted requests, for the next step
        self._counts = Stats()

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request into the queue.

        Raises RequestRefused if it can never be served, QueueFull if too many wait, EngineFailed after a failure.
        """
        self.check_open()
        self.check_room(self.waiting)
        self.enqueue(self.admit(request))

    @property
    def facts(self) -> ModelFacts:
        """What a server says of the model. Any thread may ask."""
        return facts_of(self)

    @property
    def waiting(self) -> int:
        """Requests that have not begun. (Samples that lost their blocks wait, too, but had their turn.)"""
        return sum(not sequence.begun for sequence in self.scheduler.waiting.copy())  # other threads may ask

    def check_open(self) -> None:
        """Raise EngineFailed after a failure, or when it was closed."""
        if self.error is not None:
            raise EngineFailed(f"the engine takes no requests: {self.error}")

    def check_room(self, waiting: int, *, more: int = 1) -> None:
        """Raise QueueFull if there is no room for `more` beside those that wait, RequestRefused if never."""
        check_room(waiting, more=more, limit=self.settings.queue_limit, pace=self._table.pace)

    def admit(self, request: Request) -> Request:
        """The request with its answer cut to the length there is. Any thread may ask.

        Raises RequestRefused if it can never be served, EngineFailed after a failure.
        """
        self.check_open()
        self.adapters.number(request.adapter)
        return admitted(request, self.model, self.settings, max_length=self.max_length, blocks=self.blocks.blocks)

    def enqueue(self, request: Request) -> None:
        """Put an admitted request into the queue, however many wait. Raises RequestRefused, EngineFailed."""
        self.check_open()
        if request.id in self._table.states:
            raise RequestRefused(f"a request with the id {request.id!r} is in flight; ids must differ")
        prompt = self.scheduler.add(
            request.prompt,
            priority=request.priority,
            salt=request.sharing or secrets.token_hex(8),  # a cached token gives no logits
            slots=request.samples,
            adapter=self.adapters.number(request.adapter),
        )
        self._table.add(RequestState(request, prompt, tokenizer=self.tokenizer, eos_ids=self.eos_ids))
        self._counts.requests += 1
        self._counts.prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Give a request up: its blocks are free at once, and the next step says so. Unknown ids are ignored."""
        if (state := self._table.states.get(request_id)) is not None:
            self._counts.aborted += 1
            self._pending += self._end(state, "abort", None)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._table.states and not self._pending

    def warm_up(self) -> bool:
        """Capture one of the sizes in `capture_sizes`, while there is nothing else to do; False: none is left."""
        return self.runner.decoder is not None and self.runner.decoder.warm_up()

    def close(self) -> None:
        """Give up everything and let the cache go. May be called again."""
        for request_id in list(self._table.states):
            self.abort(request_id)
        self._pending.clear()
        self.error = self.error or "the engine was closed"
        self.speculator = self.ahead = self._run = None
        if hasattr(self, "runner"):
            self.runner.close()
            del self.runner

    def check(self) -> None:
        """Raise AssertionError where the books do not agree."""
        self.scheduler.check()
        self._table.check({*self.scheduler.running, *self.scheduler.waiting})
        if not self._table.states:
            assert self.blocks.free == self.blocks.blocks, "blocks are held by nobody"

    def stats(self) -> Stats:
        """What was counted, and the engine at this moment."""
        return stats_of(self, self._counts)

    def embed(self, prompt: Sequence[int], *, pooling: str = "mean", adapter: str = "") -> Tensor:
        """The model's last normalised states (C,) float32 of a prompt: their mean, or the last token's.

        Not scaled to length 1. Raises RequestRefused, EngineFailed.
        """
        self.check_open()
        return embed(self.runner, prompt, self.adapters.number(adapter), pooling=pooling, max_length=self.max_length)

    def step(self) -> list[RequestOutput]:
        """One step for everybody; what it added. A step that fails ends all requests with reason "error"."""
        started = time.perf_counter()
        outputs, self._pending = self._pending, []
        for state in self._table.expired():
            self._counts.aborted += 1
            outputs += self._end(state, "abort", "timeout")
        try:
            with torch.inference_mode():
                outputs += self._step()
            if not self._table.states:
                self.check()
        except Exception as error:  # whatever it was: nobody may wait for ever, and no block may be lost
            outputs += self.fail(error)
        self._counts.busy_seconds += time.perf_counter() - started
        return outputs

    def _step(self) -> list[RequestOutput]:
        """Plan, copy, compute, sample, emit; or take the tokens of a step in flight, when the next is launched."""
        ahead, table = self.ahead, self._table
        if ahead is not None and ahead.flight is not None:
            return self._launch_behind(ahead, ahead.flight)
        late = None if ahead is None else ahead.late
        if ahead is not None and late is not None:
            ahead.late = None
            if not self.scheduler.can_read_prompts:
                return self._launch_behind(ahead, late)
        speculator = self.speculator
        if speculator is not None and speculator.asks:
            self._propose(speculator)
        run, self._run = self._run, None
        if run is not None and (gone_on := self._go_on(run)) is not None:
            return gone_on
        plan = self.scheduler.plan(begin=ahead is None or not ahead.patient)
        if not plan:
            return [] if late is None else self._arrived(late)
        if copies := [pair for entry in plan for pair in entry.copies]:
            self.runner.copy(copies)
        started = time.perf_counter()
        if speculator is not None:
            ahead = None  # drafts are made of the tokens
        launched = ahead.begin(plan) if ahead is not None and late is None else None
        if not launched:
            logits, first = step_logits(self.runner, plan, captured=launched is None)
        self._computed(sum(entry.count for entry in plan), time.perf_counter() - started)
        self.scheduler.advance(plan)
        if launched:
            self.sampler.forget()
            return []
        growing, scored = table.reached(plan, first, logits, scheduler=self.scheduler, texts=self.texts)
        deferred = ahead is not None and not scored and ahead.defer(logits, growing, self.sampler)
        found = [] if late is None else self._arrived(late)
        if not deferred:
            found += self._grow(logits, growing) + self._search(logits, scored)
        if ahead is not None:
            ahead.took(plan, time.perf_counter() - started)
            return found
        if speculator is not None:  # drawing is a part of what rows cost
            speculator.stepped(sum(entry.count for entry in plan), time.perf_counter() - started)
        if self.ahead is None:
            self._run = run_after(plan, list(growing), self.scheduler, table)
        return found

    def _go_on(self, run: DecodeRun) -> list[RequestOutput] | None:
        """The next step of a run; None where it has to be planned."""
        speculator = self.speculator
        if run.over or (speculator is not None and run.drafted) or (entered := run.enter()) is None:
            return None
        started = time.perf_counter()
        if self.model.adapters is not None:
            self.model.adapters.choose(run.adapters, self.model.device)
        logits = self.runner.next_logits([text[-1] for text in run.texts], entered)
        if logits is None:
            return None
        self._computed(len(run.texts), time.perf_counter() - started)
        run.computed()
        if speculator is None and run.only_ids_end_it:
            tokens = self.sampler.draw(logits, run.outputs, run.rows).tolist()
            found = self._take_each(run.outputs, tokens, group=run if run.steps else None)
        else:
            found = self._grow(logits, dict(zip(run.outputs, run.rows, strict=True)))
        if speculator is not None:
            speculator.stepped(len(run.texts), time.perf_counter() - started)
        self._run = run
        return found

    def _propose(self, speculator: Speculator) -> None:
        """Have drafts made for the output sequences that are one token behind."""
        outputs = self._table.outputs
        level = [one for one in self.scheduler.running if one in outputs and len(one.tokens) - one.computed == 1]
        for one, draft in zip(level, speculator.propose(list(map(draft_text, level))), strict=True):
            one.drafts = draft

    def _grow(self, logits: Tensor, growing: dict[TextSequence, int]) -> list[RequestOutput]:
        """Each output sequence takes what is sampled for it, from its row on."""
        if not growing:
            return []
        owners, first = list(growing), list(growing.values())
        drawn = zip(owners, self.sampler.sample(logits, owners, first, speculator=self.speculator), strict=True)
        return [piece for one, (tokens, logprobs) in drawn for piece in self._take(one, tokens, logprobs)]

    def _launch_behind(self, ahead: Ahead, flight: Flight) -> list[RequestOutput]:
        """Launch the step behind one in flight if the host need not plan it, then take the tokens of that one."""
        started = time.perf_counter()
        behind = ahead.launch_behind(flight)
        if behind is not None:
            self.sampler.forget()
            self._computed(len(behind.outputs), time.perf_counter() - started)
        found = self._arrived(flight)
        ahead.taken(flight, behind)
        return found

    def _arrived(self, flight: Flight) -> list[RequestOutput]:
        """Wait for the tokens of a step that was launched, and take them."""
        started, tokens = time.perf_counter(), flight.drawn.wait()
        self._counts.model_seconds += time.perf_counter() - started
        return self._take_each(flight.outputs, tokens, group=flight.all_of(self._table))

    def _take_each(self, outputs: list[TextSequence], tokens: list[int], *, group: Group | None) -> list[RequestOutput]:
        """Each output sequence takes its token; those that have ended do not. group: these, if none is full."""
        if group is not None and group.goes_on(tokens):
            self._counts.generated_tokens += len(tokens)
            return group.take(tokens)
        found: list[RequestOutput] = []
        for output, token in zip(outputs, tokens, strict=True):
            if not self._table.has(output):
                continue  # it has ended: one token too many
            if not output.goes_on(token):
                found += self._take(output, [token], ())
                continue
            self._counts.generated_tokens += 1
            found += output.take(token)
        return found

    def _computed(self, tokens: int, seconds: float) -> None:
        self._counts.model_seconds += seconds
        self._counts.steps += 1
        self._counts.computed_tokens += tokens

    def _take(self, output: TextSequence, tokens: list[int], logprobs: Sequence[TokenLogprob]) -> list[RequestOutput]:
        """An output sequence takes what was sampled for it."""
        text, count = output.append(tokens)
        self._counts.generated_tokens += count
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

    def _search(self, logits: Tensor, scored: dict[tuple[BeamSearch, TextSequence], int]) -> list[RequestOutput]:
        """The beams of the next step; the best texts of searches that are done."""
        if not scored:
            return []
        own, rows = list(scored), list(scored.values())
        generated, done = beams.advance(logits, own, rows, texts=self.texts, scheduler=self.scheduler)
        self._counts.generated_tokens += generated
        found: list[RequestOutput] = []
        for state in (self._table.state_of(search.beams[0].sequence) for search in done):
            found += state.emit_beams()
            for sequence in state.sequences:
                self.scheduler.finish(sequence)
            self._complete(state, failed=found[-1].finish_reason == "error")
        return found

    def fail(self, error: BaseException) -> list[RequestOutput]:
        """The engine stops for good; the last words of all requests."""
        self.error = self.error or f"{type(error).__name__}: {error}"  # what comes of the first says less
        logging.getLogger("hasten.engine").error("the engine stops", exc_info=error)
        outputs: list[RequestOutput] = []
        for state in list(self._table.states.values()):
            self._counts.failed += 1
            outputs += self._end(state, "error", self.error)
        if self.ahead is not None:
            self.ahead.flight = self.ahead.late = None
        self.blocks.forget()  # what was promised to be written in this step may not have been
        return outputs

    def _forget(self, output: TextSequence) -> None:
        if self.speculator is not None:
            self.speculator.end(output.number, output.generated, salt=output.state.request.salt)

    def _complete(self, state: RequestState, *, failed: bool = False) -> None:
        self._counts.failed += failed
        self._counts.finished += not failed
        self._table.remove(state)

    def _end(self, state: RequestState, reason: FinishReason, why: str | None) -> list[RequestOutput]:
        """Stop a request from outside: its blocks back, and a last word for each of its unfinished texts."""
        for sequence in state.sequences:
            self.scheduler.finish(sequence)
            if self._table.end(sequence):
                self._forget(sequence)
        self._table.remove(state)
        return state.emit_end(reason, why)
