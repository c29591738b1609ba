"""`hasten.generate` and `hasten.stream`: prompts in, tokens and text out."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.engine.batch_sampler import BatchSampler
from hasten.engine.decoder import Decoder
from hasten.engine.graphs import fastest_decoder, keep
from hasten.engine.params import SamplingParams
from hasten.engine.prompts import Prompt, encode_prompts, end_ids, fit, params_of
from hasten.engine.speculation import Accept, Speculator, Text, make_speculator
from hasten.engine.stopping import FinishReason, OutputText
from hasten.errors import ConfigError
from hasten.machine.host_copy import HostCopy
from hasten.model.fused import fuse_where_it_fits
from hasten.model.sharded import broadcast_from_rank0
from hasten.model.transformer import Transformer

Draft = str | Path | Transformer


@dataclass(frozen=True, slots=True)
class Output:
    """One generated continuation. tokens include the one that ended it (an end-of-text id), text does not."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int


@dataclass(slots=True)
class Timing:
    """Where the time of a generation went, in seconds; filled in while it runs.

    decode_seconds: of steps after the first token, from asking for drafts to the text of the tokens.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0  # from `started` to the first token on the host

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


def generate(
    model: Transformer,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    compiled: bool = False,
    kv_cache_dtype: str = "auto",
    timing: Timing | None = None,
    draft: Draft = "none",
    speculate: int | None = None,
    accept: Accept = "exact",
    **settings: Any,
) -> list[Output]:
    """Continue prompts, all of them in one batch; every one gets what it would get alone.

    The model is fused first where it can be, in place and without changing a weight (`hasten.unfuse` undoes it).

    prompts: a text, a list of token ids, or a sequence of either. params: for all, or one for each prompt; single
    fields may be given by keyword instead (temperature=0, max_new_tokens=100, …). kv_cache_dtype: how keys and values
    are kept, one of `hasten.engine.params.KVCacheDtype`. draft, speculate, accept: what proposes tokens, for the
    same text sooner, how many at most, and which are taken (`make_speculator`). Raises ConfigError for a prompt that
    does not fit, a text without a tokenizer, or an id outside the vocabulary.
    """
    if not compiled:
        fuse_where_it_fits(model)
    run = Generation(
        model,
        prompts,
        params,
        compiled=compiled,
        kv_cache_dtype=kv_cache_dtype,
        timing=timing,
        speculator=make_speculator(model, draft, speculate=speculate, accept=accept),
        **settings,
    )
    for _ in run:
        pass
    return run.results()


def stream(
    model: Transformer,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    draft: Draft = "none",
    speculate: int | None = None,
    accept: Accept = "exact",
    **settings: Any,
) -> Iterator[str]:
    """Continue one prompt and yield its text piece by piece: whole characters, never a part of a stop string.

    The model is fused, and draft, speculate, accept, settings are taken, as in `generate`.
    """
    fuse_where_it_fits(model)
    speculator = make_speculator(model, draft, speculate=speculate, accept=accept)
    run = Generation(model, prompt, params, speculator=speculator, **settings)
    if len(run.prompts) != 1:
        raise ConfigError(f"stream takes one prompt, found {len(run.prompts)}; use generate for several")
    yield from run.texts()


class Generation:
    """Prompts being continued together. Iterating gives, for each step, (row, token, the text it added) of the
    unfinished rows. `results` is what there is so far.

    decoder: one whose cache already holds the beginning of the (only) prompt, as a chat does; `reused` of its tokens
    are then not computed again. speculator: proposes tokens that are checked together, for the same text sooner.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        compiled: bool = False,
        kv_cache_dtype: str = "auto",
        timing: Timing | None = None,
        decoder: Decoder | None = None,
        reused: int = 0,
        speculator: Speculator | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.speculator = speculator
        self.prompts = encode_prompts(model, prompts)
        rows = params_of(params, prompts=len(self.prompts), **settings)
        seeds = [secrets.randbits(63) for _ in rows]  # drawn here, because a draft model draws with the same
        (seeds,) = broadcast_from_rank0(model, [seeds])
        self.params = [
            fit(row if row.seed is not None else replace(row, seed=seed), len(prompt), model)
            for row, prompt, seed in zip(rows, self.prompts, seeds, strict=True)
        ]
        self.timing = timing if timing is not None else Timing()
        capacity = max(len(p) + row.max_new_tokens for p, row in zip(self.prompts, self.params, strict=True))
        self.reused = reused
        self._own_decoder = decoder is None
        self.decoder = decoder or fastest_decoder(
            model, batch=len(self.prompts), capacity=capacity, compiled=compiled, kv_cache_dtype=kv_cache_dtype
        )
        self.eos_ids = end_ids(model)
        self.outputs = [
            OutputText(row, tokenizer=model.tokenizer, eos_ids=self.eos_ids, context=prompt)
            for row, prompt in zip(self.params, self.prompts, strict=True)
        ]
        self._taken: list[list[tuple[int, str]]] = [[] for _ in self.prompts]  # (token, text it added) of each row
        self._tokens = [list(prompt) for prompt in self.prompts]  # of prompt and answer

    def results(self) -> list[Output]:
        """Every prompt's continuation up to now; finish_reason is "length" for a row that has not ended, too."""
        found = []
        for prompt, taken, output in zip(self.prompts, self._taken, self.outputs, strict=True):
            text = "".join(text for _, text in taken)
            found.append(Output([token for token, _ in taken], text, output.finish_reason or "length", len(prompt)))
        return found

    def texts(self) -> Iterator[str]:
        """The pieces of text as they come, of all rows."""
        for step in self:
            yield from (text for _, _, text in step if text)

    def __iter__(self) -> Iterator[list[tuple[int, int, str]]]:
        ahead = self.speculator is None and self.decoder.runs_ahead
        try:
            yield from self._steps_ahead() if ahead else self._steps()
        finally:  # closed early, too
            if self._own_decoder:
                keep(self.decoder)
            for row, output in enumerate(self.outputs):
                if self.speculator is not None and output.finish_reason is None:
                    self.speculator.end(row, self._tokens[row][len(self.prompts[row]) :])

    def _sampler(self) -> BatchSampler:
        vocabulary, device = self.model.config.vocab_size, self.model.device
        return BatchSampler(self.params, self.prompts, eos_ids=self.eos_ids, vocab_size=vocabulary, device=device)

    def _steps_ahead(self) -> Iterator[list[tuple[int, int, str]]]:
        """`_steps` without drafts, each queued before the tokens of the one before it are read."""
        timing, most = self.timing, [row.max_new_tokens for row in self.params]
        sampler = self._sampler()
        start = time.perf_counter()
        logits = self.decoder.prefill([prompt[self.reused :] for prompt in self.prompts])
        tokens = sampler.next_tokens(logits, steps=[0] * len(most))
        reading: HostCopy | None = HostCopy(tokens)
        active, count = [True] * len(most), 0  # rows that have not ended, tokens that each of them got
        queued: list[bool] = []  # rows of a step whose tokens nobody has read
        try:
            while reading is not None:
                behind = None
                going = [on and length > count + 1 for on, length in zip(active, most, strict=True)]
                if count and any(going):  # the first token is not kept waiting for the capture of a step
                    behind, tokens = self._queue(sampler, tokens, going, count + 1)
                    queued = going
                taken = reading.tensor().tolist()
                now = time.perf_counter()
                count += 1
                pushed = [one for row, on in enumerate(active) if on for one in self._push(row, [taken[row]])]
                active = [output.finish_reason is None for output in self.outputs]
                if timing.first_token == 0.0:
                    timing.prefill_tokens += sum(len(p) - self.reused for p in self.prompts)
                    timing.prefill_seconds += now - start
                    timing.first_token = now - timing.started
                else:
                    timing.decode_seconds += time.perf_counter() - start
                    timing.decode_tokens += len(pushed)
                if any(over := [ran and not on for ran, on in zip(queued, active, strict=False)]):
                    self.decoder.undo(over)
                    queued = [ran and on for ran, on in zip(queued, active, strict=True)]
                yield pushed
                start = time.perf_counter()
                if behind is None and any(active):
                    behind, tokens = self._queue(sampler, tokens, active, count)
                    queued = active
                reading = behind if any(active) else None
                queued = [] if reading is behind else queued
        finally:  # closed early, with a step on its way
            if any(queued):
                self.decoder.undo(queued)

    def _queue(self, sampler: BatchSampler, tokens: Tensor, going: list[bool], count: int) -> tuple[HostCopy, Tensor]:
        """Queue the step after these tokens and the draw from its logits, when each row has got `count` tokens."""
        tokens = sampler.next_tokens(self.decoder.decode(tokens, active=going), steps=[count] * len(going))
        return HostCopy(tokens), tokens

    def _steps(self) -> Iterator[list[tuple[int, int, str]]]:
        timing, sampler = self.timing, self._sampler()
        start = drafted = time.perf_counter()
        logits = self.decoder.prefill([prompt[self.reused :] for prompt in self.prompts])
        drafts: list[list[int]] = []
        active = [True] * len(self.prompts)
        while True:
            counts = [output.count for output in self.outputs]
            # All that depends on the logits is queued before the one unavoidable wait, for the tokens themselves.
            if any(drafts):
                drawn_from = (
                    None if self.speculator is None else [*map(self.speculator.probabilities, range(len(drafts)))]
                )
                taken = broadcast_from_rank0(
                    self.model, sampler.take(logits, drafts, steps=counts, probabilities=drawn_from)
                )
                tokens = torch.tensor([own[-1] for own in taken], device=self.model.device)
            else:
                tokens = sampler.next_tokens(logits, steps=counts if self.speculator else [max(counts)] * len(counts))
                taken = [[token] for token in tokens.tolist()]
            now = time.perf_counter()
            pushed = [one for row, on in enumerate(active) if on for one in self._push(row, taken[row])]
            going = [output.finish_reason is None for output in self.outputs]
            if self.speculator is not None:
                self._learn(self.speculator, drafts, counts, now - drafted)
                for row in (row for row, on in enumerate(active) if on and not going[row]):
                    self.speculator.end(row, self._tokens[row][len(self.prompts[row]) :])
            if timing.first_token == 0.0:
                timing.prefill_tokens += sum(len(p) - self.reused for p in self.prompts)
                timing.prefill_seconds += now - start
                timing.first_token = now - timing.started
            else:
                timing.decode_seconds += time.perf_counter() - start
                timing.decode_tokens += len(pushed)
            yield pushed
            active = going
            if not any(active):
                return
            start = time.perf_counter()
            drafts = self._drafts(active)
            drafted = time.perf_counter()
            if any(drafts):  # rows that have ended go along, and back
                logits = self.decoder.verify([[own[-1], *draft] for own, draft in zip(taken, drafts, strict=True)])
            else:
                logits = self.decoder.decode(tokens, active=active)

    def _push(self, row: int, tokens: Sequence[int]) -> list[tuple[int, int, str]]:
        """Give a row its tokens, up to the one that ends it."""
        output, pushed = self.outputs[row], []
        for token in tokens:
            pushed.append((row, token, output.push(token)))
            if output.finish_reason is not None:
                break
        self._taken[row] += [(token, text) for _, token, text in pushed]
        self._tokens[row] += [token for _, token, _ in pushed]
        return pushed

    def _drafts(self, active: Sequence[bool]) -> list[list[int]]:
        """What the speculator proposes for the rows that go on; empty for all others."""
        drafts: list[list[int]] = [[] for _ in active]
        if self.speculator is None:
            return drafts
        texts = []
        asked = [row for row, on in enumerate(active) if on] if self.speculator.asks else []
        for row in asked:
            params, count = self.params[row], self.outputs[row].count
            room = min(self.decoder.room(row), params.max_new_tokens - count - 1)
            texts.append(Text(number=row, tokens=self._tokens[row], step=count, params=params, room=room))
        for text, draft in zip(texts, self.speculator.propose(texts), strict=True):
            drafts[text.number] = draft
        return broadcast_from_rank0(self.model, drafts)

    def _learn(
        self, speculator: Speculator, drafts: Sequence[Sequence[int]], counts: Sequence[int], seconds: float
    ) -> None:
        """Forget the keys of what was wrong, and tell the speculator what was right and how long it took."""
        if any(drafts):  # the newest token's keys are not there yet
            self.decoder.truncate([len(tokens) - 1 for tokens in self._tokens])
        grown = [output.count - count for output, count in zip(self.outputs, counts, strict=True)]
        rows = 0  # of the texts that go on
        for row, taken in enumerate(grown):
            if taken and counts[row]:
                checked = len(drafts[row]) if drafts else 0
                speculator.observe(row, taken, checked=checked)
                rows += 1 + checked
        if max(counts):
            speculator.stepped(rows, seconds)
