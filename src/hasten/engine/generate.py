"""`hasten.generate` and `hasten.stream`: prompts in, tokens and text out."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.engine.admission import check_request
from hasten.engine.cache import row_format
from hasten.engine.engine import Engine
from hasten.engine.for_texts import engine_for, release_engine
from hasten.engine.params import SamplingParams
from hasten.engine.prompts import Prompt, encode_prompts, fit, params_of
from hasten.engine.request import FinishReason, Request, RequestOutput
from hasten.engine.speculation import Accept, Speculator, make_speculator
from hasten.errors import ConfigError
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

    prefill_seconds: until all prompts are read and have their first token. decode_seconds: of the steps after that,
    from asking for drafts to the text of the tokens.
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
        gathered=True,
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
    for outputs in run:
        for output in outputs:
            if output.text:
                yield output.text


class Generation:
    """Prompts that an `Engine` continues together. Iterating takes its steps and gives what each of them added.

    The `request_id` of an output is the number of its prompt. `results` is what there is so far.
    engine: one with room for these prompts, whose cache may hold the beginning of a prompt, as a chat does (`reused`
    tokens of it). speculator: proposes tokens that are checked together, for the same text sooner. gathered: a text is
    given out at its end.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        compiled: bool = False,
        kv_cache_dtype: Any = "auto",
        timing: Timing | None = None,
        engine: Engine | None = None,
        speculator: Speculator | None = None,
        gathered: bool = False,
        **settings: Any,
    ) -> None:
        row_format(kv_cache_dtype)  # refuses an unknown one
        self.prompts = encode_prompts(model, prompts)
        rows = params_of(params, prompts=len(self.prompts), **settings)
        seeds = [secrets.randbits(63) for _ in rows]
        (seeds,) = broadcast_from_rank0(model, [seeds])
        self.params = [
            fit(row if row.seed is not None else row.with_seed(seed), len(prompt), model)
            for row, prompt, seed in zip(rows, self.prompts, seeds, strict=True)
        ]
        self._requests = [
            Request(id=str(number), prompt=prompt, params=row, gathered=gathered)
            for number, (prompt, row) in enumerate(zip(self.prompts, self.params, strict=True))
        ]
        for request in self._requests:  # all else of `Engine.admit` was checked above, or there is room for it
            check_request(request, vocab_size=model.config.vocab_size)
        self.timing = timing if timing is not None else Timing()
        lengths = [len(prompt) + row.max_new_tokens for prompt, row in zip(self.prompts, self.params, strict=True)]
        self._own_engine = engine is None
        self.engine = engine or engine_for(
            model, lengths, compiled=compiled, kv_cache_dtype=kv_cache_dtype, speculator=speculator
        )
        self.reused = 0
        self.sound = True  # whether the engine may continue other texts
        self._outputs: list[list[RequestOutput]] = [[] for _ in rows]

    @property
    def unfinished(self) -> set[int]:
        """The numbers of the prompts whose texts have not ended."""
        return {row for row, own in enumerate(self._outputs) if not own or own[-1].finish_reason in (None, "abort")}

    def results(self) -> list[Output]:
        """Every prompt's continuation up to now; finish_reason is "length" for one that has not ended, too."""
        found = []
        for row, (prompt, own) in enumerate(zip(self.prompts, self._outputs, strict=True)):
            reason = "length" if row in self.unfinished else own[-1].finish_reason
            tokens = [token for output in own for token in output.tokens]
            found.append(Output(tokens, "".join(output.text for output in own), reason or "length", len(prompt)))
        return found

    def texts(self) -> Iterator[str]:
        """The pieces of text as they come, of all prompts."""
        for step in self:
            yield from (output.text for output in step if output.text)

    def __iter__(self) -> Iterator[list[RequestOutput]]:
        engine, timing = self.engine, self.timing
        counts, unfinished = engine.continuations.counts, len(self._requests)
        reading = True  # a prompt is read, or its first token waited for
        self.sound = False
        try:
            for request in self._requests:
                engine.enqueue(request)
            while unfinished:
                before, start = counts.generated_tokens, time.perf_counter()
                self.sound = False
                outputs = engine.advance()
                self.sound = True
                for output in outputs:
                    self._outputs[int(output.request_id)].append(output)
                    unfinished -= output.finished
                now, count = time.perf_counter(), counts.generated_tokens - before
                if not reading:
                    timing.decode_seconds += now - start
                    timing.decode_tokens += count
                else:
                    timing.prefill_seconds += now - start
                    if count and not timing.first_token:
                        timing.first_token = now - timing.started
                    if count and not engine.scheduler.behind:
                        reading = False
                        self.reused = sum(own[0].cached_tokens for own in self._outputs if own)
                        timing.prefill_tokens += sum(map(len, self.prompts)) - self.reused
                yield outputs
        finally:  # closed early, too
            self._leave()

    def _leave(self) -> None:
        """Take what has not ended out of the engine. After an interruption within a step, check that it is sound."""
        engine = self.engine
        try:
            for request in self._requests:
                engine.abort(request.id)
            for output in engine.aborted():
                self._outputs[int(output.request_id)].append(output)
            if not self.sound:
                engine.check()
                self.sound = True
        except Exception:  # its books were left half written
            self.sound = False
        if self._own_engine and self.sound:
            release_engine(engine)
