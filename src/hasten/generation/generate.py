"""`hasten.generate` and `hasten.stream`: prompts in, tokens and text out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.errors import ConfigError
from hasten.generation.batch_sampler import BatchSampler
from hasten.generation.decoder import Decoder
from hasten.generation.graphs import fastest_decoder
from hasten.generation.params import SamplingParams
from hasten.generation.prompts import Prompt, encode_prompts, end_ids, fit, params_of
from hasten.generation.stopping import FinishReason, OutputText
from hasten.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Output:
    """One generated continuation. tokens include the one that ended it (an end-of-text id), text does not."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int


@dataclass(slots=True)
class Timing:
    """Where the time of a generation went, in seconds; filled in while it runs."""

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
    **settings: Any,
) -> list[Output]:
    """Continue prompts, all of them in one batch; every one gets what it would get alone.

    prompts: a text, a list of token ids, or a sequence of either. params: for all, or one for each prompt; single
    fields may be given by keyword instead (temperature=0, max_new_tokens=100, …). kv_cache_dtype: how keys and values
    are kept, one of `hasten.generation.params.KVCacheDtype`. Raises ConfigError for a prompt that does not fit, a text
    without a tokenizer, or an id outside the vocabulary.
    """
    run = Generation(
        model, prompts, params, compiled=compiled, kv_cache_dtype=kv_cache_dtype, timing=timing, **settings
    )
    for _ in run:
        pass
    return run.results()


def stream(model: Transformer, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Iterator[str]:
    """Continue one prompt and yield its text piece by piece: whole characters, never a part of a stop string.

    settings: as of `generate`.
    """
    run = Generation(model, prompt, params, **settings)
    if len(run.prompts) != 1:
        raise ConfigError(f"stream takes one prompt, found {len(run.prompts)}; use generate for several")
    yield from run.texts()


class Generation:
    """Prompts being continued together. Iterating gives, for each step, (row, token, the text it added) of the
    unfinished rows. `results` is what there is so far.

    decoder: one whose cache already holds the beginning of the (only) prompt, as a chat does; `reused` of its tokens
    are then not computed again.
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
        **settings: Any,
    ) -> None:
        self.model = model
        self.prompts = encode_prompts(model, prompts)
        rows = params_of(params, prompts=len(self.prompts), **settings)
        self.params = [fit(row, len(p), model) for row, p in zip(rows, self.prompts, strict=True)]
        self.timing = timing if timing is not None else Timing()
        capacity = max(len(p) + row.max_new_tokens for p, row in zip(self.prompts, self.params, strict=True))
        self.reused = reused
        self.decoder = decoder or fastest_decoder(
            model, batch=len(self.prompts), capacity=capacity, compiled=compiled, kv_cache_dtype=kv_cache_dtype
        )
        self.eos_ids = end_ids(model)
        self.outputs = [
            OutputText(row, tokenizer=model.tokenizer, eos_ids=self.eos_ids, context=prompt)
            for row, prompt in zip(self.params, self.prompts, strict=True)
        ]
        self._taken: list[list[tuple[int, str]]] = [[] for _ in self.prompts]  # (token, text it added) of each row

    def results(self) -> list[Output]:
        """Every prompt's continuation up to now; finish_reason "length" stands for a row that has not ended, too."""
        return [
            Output(
                [token for token, _ in taken],
                "".join(text for _, text in taken),
                output.finish_reason or "length",
                len(prompt),
            )
            for prompt, taken, output in zip(self.prompts, self._taken, self.outputs, strict=True)
        ]

    def texts(self) -> Iterator[str]:
        """The pieces of text as they come, of all rows."""
        for step in self:
            yield from (text for _, _, text in step if text)

    def __iter__(self) -> Iterator[list[tuple[int, int, str]]]:
        timing, vocabulary = self.timing, self.model.config.vocab_size
        sampler = BatchSampler(
            self.params, self.prompts, eos_ids=self.eos_ids, vocab_size=vocabulary, device=self.model.device
        )
        start = time.perf_counter()
        logits = self.decoder.prefill([prompt[self.reused :] for prompt in self.prompts])
        active = [True] * len(self.prompts)
        for step in range(max(row.max_new_tokens for row in self.params)):
            # Everything that depends on the logits is queued before the one unavoidable wait, for the token itself.
            tokens = sampler.next_tokens(logits, steps=[step] * len(self.prompts))
            found = tokens.tolist()
            now = time.perf_counter()
            if step == 0:
                timing.prefill_tokens += sum(len(p) - self.reused for p in self.prompts)
                timing.prefill_seconds += now - start
                timing.first_token = now - timing.started
            else:
                timing.decode_seconds += now - start
                timing.decode_tokens += sum(active)
            pushed = [(row, found[row], self.outputs[row].push(found[row])) for row, on in enumerate(active) if on]
            for row, token, text in pushed:
                self._taken[row].append((token, text))
            yield pushed
            active = [output.finish_reason is None for output in self.outputs]
            if not any(active):
                return
            start = time.perf_counter()
            logits = self.decoder.decode(tokens, active=active)
