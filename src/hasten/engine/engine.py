"""The engine: requests in, one step of the model for all of them together, pieces of text out. One thread owns it.

A step: the scheduler plans which tokens of which sequences are computed (`Scheduler`), blocks that are written are made
private (`KVCache.copy`), one call of the model over the ragged rows (`runner.step_logits`), one batched draw
(`Sampler.take`), and each output sequence takes its tokens (`TextSequence.append`). While the same sequences take
one token each, a step skips the plan and writes only what changed (`DecodeRun`). Requests with several samples compute
their prompt once and fork; a beam is a fork.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.engine.adapters import AdapterNumbers
from hasten.engine.admission import admitted, check_room, settings_on_device, snapshots_of, with_room_for_states
from hasten.engine.blocks import BlockManager, blocks_of
from hasten.engine.continuations import Continuations
from hasten.engine.following import capture_steps, runner_of
from hasten.engine.logprobs import TokenTexts
from hasten.engine.prompts import end_ids
from hasten.engine.request import EngineFailed, Request, RequestOutput, RequestRefused
from hasten.engine.request_state import RequestState, RequestTable
from hasten.engine.run import DecodeRun, run_after
from hasten.engine.runner import ModelRunner, embed, step_logits
from hasten.engine.scheduler import Scheduler
from hasten.engine.settings import EngineSettings, ModelFacts, Stats
from hasten.engine.speculation import Speculator
from hasten.engine.statistics import facts_of, stats_of
from hasten.machine.contention import context_of_steps
from hasten.model.transformer import Transformer
from hasten.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hasten.engine.ahead import Ahead, Flight
    from hasten.engine.disk_cache import DiskCache


class Engine:
    """Continues many requests at once. Every method is to be called by one thread, unless it says otherwise.

    speculator: None, or what proposes the next tokens of sequences. Drafts are checked in one step and taken as far as
    they are what would have been drawn, so that the text does not change. adapters: the names of the model's, in order.
    secret: of the keys of its blocks (`BlockManager`). runner: with a cache made for texts that are known
    (`hasten.engine.for_texts`); by default one over a cache of the size in `settings`. Raises ConfigError and
    ResourceError for a `prefix_cache` folder that cannot be used.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        settings: EngineSettings,
        *,
        runner: ModelRunner | None = None,
        speculator: Speculator | None = None,
        adapters: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        settings = settings_on_device(settings, model)
        if runner is None:
            head_states = 0 if speculator is None else speculator.head_states
            settings = with_room_for_states(settings, model, head_states=head_states)
            runner = runner_of(model, settings, head_states=head_states)
        self.model, self.tokenizer, self.settings, self.runner = model, tokenizer, settings, runner
        # Where sequences do not choose theirs, all have the one that the model has for all.
        choice = None if runner.chooses_adapters else model.adapters
        self.adapters = AdapterNumbers(adapters, unnamed=-1 if choice is None else choice.every)
        self.max_length, self.cache_bytes = runner.max_length, runner.cache.bytes
        files = None
        if isinstance(folder := settings.prefix_cache, str | Path):
            from hasten.engine import disk_cache  # which most starts do without

            files = disk_cache.block_files(Path(folder), settings.prefix_cache_bytes, model, secret=secret)
            secret = runner.shared_secret(disk_cache.block_secret(files, model, runner.cache, adapters=adapters))
        self.blocks = BlockManager(
            blocks=runner.cache.blocks,
            block_size=settings.block_size,
            prefix_cache=settings.prefix_cache is not False,
            reach=runner.reach,
            secret=secret,
            snapshots=snapshots_of(settings, model),
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_sequences=settings.max_sequences,
            token_budget=settings.budget,
            stretches_at=model.config.stretches_at,
            block_each=runner.side_by_side,
            keeps_states=model.config.keeps_states,
        )
        self.disk: DiskCache | None = None
        if files is not None:
            self.disk = runner.disk_cache(files, self.blocks)
            self.scheduler.ready, self.scheduler.gone = self.disk.ready, self.disk.give_up
            self.blocks.on_filled = self.disk.keep
            weakref.finalize(self, self.disk.close)  # its threads must not keep the cache of a forgotten engine
        self.eos_ids, self.texts = end_ids(model), TokenTexts(tokenizer)
        self._table = RequestTable()
        self.continuations = Continuations(
            model,
            self.scheduler,
            self._table,
            eos_ids=self.eos_ids,
            texts=self.texts,
            speculator=speculator,
            in_step=runner.in_step,
        )
        self.ahead: Ahead | None = None
        if runner.decoder is not None:
            from hasten.engine.ahead import Ahead

            self.ahead = Ahead(self.runner, self.scheduler, self._table)
        self._run: DecodeRun | None = None  # of the sequences that the last step gave a token each
        # Only blocks in one native call give the same bits for any number of threads.
        self._cores = context_of_steps(shares_cores=model.device.type == "cpu" and model.stack is not None)
        self.error: str | None = None  # why the engine stopped for good
        self._pending: list[RequestOutput] = []  # of aborted requests, for the next step
        # Called with (source, target) of blocks that a step copies, while somebody watches (`hasten.engine.watch`).
        self.on_copies: Callable[[list[tuple[int, int]]], None] | None = None

    @property
    def speculator(self) -> Speculator | None:
        """What proposes the next tokens of sequences, if anything does."""
        return self.continuations.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator | None) -> None:
        self.continuations.speculator = speculator

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
        return admitted(request, self.model, self.settings, self.scheduler, max_length=self.max_length)

    def enqueue(self, request: Request) -> None:
        """Put an admitted request into the queue, however many wait. Raises RequestRefused, EngineFailed."""
        self.check_open()
        if request.id in self._table.states:
            raise RequestRefused(f"a request with the id {request.id!r} is in flight; ids must differ")
        prompt = self.scheduler.add(
            request.prompt,
            priority=request.priority,
            salt=self.adapters.sharing(request),
            slots=request.samples,
            adapter=self.adapters.number(request.adapter),
        )
        self._table.add(RequestState(request, prompt, tokenizer=self.tokenizer, eos_ids=self.eos_ids))
        self.continuations.counts.requests += 1
        self.continuations.counts.prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Give a request up: its blocks are free at once, and the next step says so. Unknown ids are ignored."""
        if (state := self._table.states.get(request_id)) is not None:
            self.continuations.counts.aborted += 1
            self._pending += self.continuations.end(state, "abort", None)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._table.states and not self._pending

    def grow(self, max_length: int) -> None:
        """Have room for a text of this length, keeping what the cache holds. Between texts only."""
        assert not self._table.states, "an engine grows between texts"
        size, reach = self.settings.block_size, self.blocks.reach
        needed = 1 + blocks_of(max_length, size, reach=reach, step=self.settings.budget)
        blocks = max(self.blocks.blocks, needed)
        self.settings = replace(self.settings, max_length=max_length)
        self.runner.grow(blocks, max_length)
        self.blocks.grow(blocks)
        capture_steps(self.runner, self.settings)
        self.max_length, self.cache_bytes, self._run = max_length, self.runner.cache.bytes, None

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
        if self.disk is not None:
            self.disk.close()
            self.scheduler.ready = None
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
        return stats_of(self, self.continuations.counts)

    def embed(self, prompt: Sequence[int], *, pooling: str = "mean", adapter: str | int = "") -> Tensor:
        """The model's last normalised states (C,) float32 of a prompt: their mean, or the last token's.

        Not scaled to length 1. adapter: its name, or its number (`AdapterNumbers.hold`). Raises RequestRefused,
        EngineFailed.
        """
        self.check_open()
        number = adapter if isinstance(adapter, int) else self.adapters.number(adapter)
        return embed(self.runner, prompt, number, pooling=pooling, max_length=self.max_length)

    def step(self) -> list[RequestOutput]:
        """One step for everybody; what it added. A step that fails ends all requests with reason "error"."""
        started = time.perf_counter()
        outputs = self.aborted()
        for state in self._table.expired():
            self.continuations.counts.aborted += 1
            outputs += self.continuations.end(state, "abort", "timeout")
        try:
            outputs += self.advance()
        except Exception as error:  # whatever it was: nobody may wait for ever, and no block may be lost
            outputs += self.fail(error)
        self.continuations.counts.busy_seconds += time.perf_counter() - started
        return outputs

    def advance(self) -> list[RequestOutput]:
        """One step for everybody; what it added. What it raises leaves the requests to be given up."""
        try:
            with self._cores(), torch.inference_mode():
                outputs = self._step()
            if not self._table.states:
                self.check()
        except BaseException:
            self.blocks.forget_promised()
            raise
        return outputs

    def aborted(self) -> list[RequestOutput]:
        """The last words of aborted requests that no step has given out yet."""
        outputs, self._pending = self._pending, []
        return outputs

    def _step(self) -> list[RequestOutput]:
        """Plan, copy, compute, sample, emit; or take the tokens of a step in flight, when the next is launched."""
        ahead, table = self.ahead, self._table
        if self.blocks.slots.asked:
            self.runner.copy_states(self.blocks.slots.copies())
        if ahead is not None and ahead.flight is not None:
            return self._launch_behind(ahead, ahead.flight)
        late = None if ahead is None else ahead.late
        if ahead is not None and late is not None:
            ahead.late = None
            if not self.scheduler.can_read_prompts:
                return self._launch_behind(ahead, late)
        speculator = self.continuations.speculator
        self.runner.keeps_states = speculator is not None and speculator.reader is not None
        if speculator is not None and (speculator.asks or self.runner.in_step):
            self._table.propose(speculator, self.scheduler, self.runner)
        run, self._run = self._run, None
        if run is not None and (gone_on := run.next_step(self.runner, self.continuations)) is not None:
            self._run = run
            return gone_on
        plan = self.scheduler.plan(begin=ahead is None or not ahead.patient)
        if not plan:
            if self.disk is not None:
                self.disk.wait()
            return [] if late is None else self.continuations.arrived(late)
        if self.blocks.slots.asked:
            self.runner.copy_states(self.blocks.slots.copies())
        if copies := [pair for entry in plan for pair in entry.copies]:
            self.runner.copy(copies)
            if self.on_copies is not None:
                self.on_copies(copies)
        started = time.perf_counter()
        if speculator is not None:
            ahead = None  # drafts are made of the tokens
        launched = ahead.begin(plan) if ahead is not None and late is None else None
        if not launched:
            logits, first = step_logits(self.runner, plan, captured=launched is None)
        if speculator is not None:
            speculator.take_states(
                [(one.sequence.number, one.start, one.count) for one in plan], self.runner.last_states
            )
        self._computed(sum(entry.count for entry in plan), time.perf_counter() - started)
        self.scheduler.advance(plan)
        if launched:
            self.continuations.sampler = None
            return []
        growing, scored = table.reached(plan, first, logits, scheduler=self.scheduler, texts=self.texts)
        deferred = ahead is not None and not scored and ahead.defer(logits, growing, self.continuations)
        found = [] if late is None else self.continuations.arrived(late)
        if not deferred:
            found += self.continuations.grow(logits, growing) + self.continuations.search(logits, scored)
        if ahead is not None:
            ahead.took(plan, time.perf_counter() - started)
            return found
        if speculator is not None:  # drawing is a part of what rows cost
            speculator.stepped(sum(entry.count for entry in plan), time.perf_counter() - started)
        if self.ahead is None:
            self._run = run_after(plan, list(growing), self.continuations.sampler, self.scheduler, table)
        return found

    def _launch_behind(self, ahead: Ahead, flight: Flight) -> list[RequestOutput]:
        """Launch the step behind one in flight if the host need not plan it, then take the tokens of that one."""
        started = time.perf_counter()
        behind = ahead.launch_behind(flight)
        if behind is not None:
            self.continuations.sampler = None
            self._computed(len(behind.outputs), time.perf_counter() - started)
        found = self.continuations.arrived(flight)
        ahead.taken(flight, behind)
        return found

    def _computed(self, tokens: int, seconds: float) -> None:
        if self.disk is not None:
            self.disk.computed(tokens, seconds)
        self.continuations.counts.model_seconds += seconds
        self.continuations.counts.steps += 1
        self.continuations.counts.computed_tokens += tokens

    def fail(self, error: BaseException) -> list[RequestOutput]:
        """The engine stops for good; the last words of all requests."""
        self.error = self.error or f"{type(error).__name__}: {error}"  # what comes of the first says less
        logging.getLogger("hasten.engine").error("the engine stops", exc_info=error)
        outputs: list[RequestOutput] = []
        for state in list(self._table.states.values()):
            self.continuations.counts.failed += 1
            outputs += self.continuations.end(state, "error", self.error)
        if self.ahead is not None:
            self.ahead.flight = self.ahead.late = None
        self.blocks.forget()
        return outputs
