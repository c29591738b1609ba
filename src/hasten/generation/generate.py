"""`hasten.generate` and `hasten.stream`: prompts in, tokens and text out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hasten.errors import ConfigError
from hasten.generation.decoder import Decoder
from hasten.generation.graphs import fastest_decoder
from hasten.generation.ids import check_ids
from hasten.generation.params import SamplingParams
from hasten.generation.sampling import History, RowParams, banned_tokens, next_tokens
from hasten.generation.stopping import Delta, FinishReason, OutputText, stop_ids
from hasten.model.transformer import Transformer

Prompt = str | Sequence[int]


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
    timing: Timing | None = None,
    **settings: Any,
) -> list[Output]:
    """Continue prompts, all of them in one batch; every one gets what it would get alone.

    prompts: a text, a list of token ids, or a sequence of either. params: for all, or one for each prompt; single
    fields may be given by keyword instead (temperature=0, max_new_tokens=100, …). Raises ConfigError for a prompt that
    does not fit, a text without a tokenizer, or an id outside the vocabulary.
    """
    run = Generation(model, prompts, params, compiled=compiled, timing=timing, **settings)
    for _ in run:
        pass
    return run.results()


def stream(model: Transformer, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Iterator[str]:
    """Continue one prompt and yield its text piece by piece: whole characters, never a part of a stop string."""
    run = Generation(model, prompt, params, **settings)
    if len(run.prompts) != 1:
        raise ConfigError(f"stream takes one prompt, found {len(run.prompts)}; use generate for several")
    for step in run:
        for _, _, delta in step:
            if delta.text:
                yield delta.text


class Generation:
    """Prompts being continued together. Iterating gives, for each step, (row, token, delta) of the unfinished rows.
    `results` is what there is so far.

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
        timing: Timing | None = None,
        decoder: Decoder | None = None,
        reused: int = 0,
        **settings: Any,
    ) -> None:
        self.model = model
        self.prompts = encode_prompts(model, prompts)
        given: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * len(self.prompts)
        rows: list[SamplingParams] = [SamplingParams() if row is None else row for row in given]
        if not all(isinstance(row, SamplingParams) for row in rows):
            raise ConfigError(f"params must be SamplingParams, or a list of them; found {params!r:.80}")
        if len(rows) != len(self.prompts):
            raise ConfigError(f"{len(rows)} sampling parameters were given for {len(self.prompts)} prompts")
        if settings:
            rows = [_with(row, settings) for row in rows]
        if any(row.stop for row in rows) and model.tokenizer is None:
            raise ConfigError("stop strings need text, and this model's folder has no tokenizer; use stop_token_ids")
        self.params = [fit(row, len(p), model) for row, p in zip(rows, self.prompts, strict=True)]
        self.timing = timing if timing is not None else Timing()
        capacity = max(len(p) + row.max_new_tokens for p, row in zip(self.prompts, self.params, strict=True))
        self.reused = reused
        self.decoder = decoder or fastest_decoder(model, batch=len(self.prompts), capacity=capacity, compiled=compiled)
        eos = end_ids(model)
        self._stops = [stop_ids(row, eos_ids=eos) for row in self.params]
        self.outputs = [
            OutputText(row, tokenizer=model.tokenizer, eos_ids=eos, context=prompt)
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

    def __iter__(self) -> Iterator[list[tuple[int, int, Delta]]]:
        timing, device, vocabulary = self.timing, self.model.device, self.model.config.vocab_size
        settings = RowParams.stack(self.params, vocab_size=vocabulary, device=device)
        history = (
            History.of_prompts(self.prompts, vocab_size=vocabulary, device=device) if settings.needs_history else None
        )
        shortest = max(row.min_new_tokens for row in self.params)
        start = time.perf_counter()
        logits = self.decoder.prefill([prompt[self.reused :] for prompt in self.prompts])
        active = [True] * len(self.prompts)
        for step in range(max(row.max_new_tokens for row in self.params)):
            # Everything that depends on the logits is queued before the one unavoidable wait, for the token itself.
            tokens = next_tokens(
                logits,
                settings,
                steps=torch.full((len(self.prompts),), step, device=device),
                history=history,
                banned=self._banned(step) if step < shortest else None,
            )
            if history is not None:
                history.observe(tokens)
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
            for row, token, delta in pushed:
                self._taken[row].append((token, delta.text))
            yield pushed
            active = [output.finish_reason is None for output in self.outputs]
            if not any(active):
                return
            start = time.perf_counter()
            logits = self.decoder.decode(tokens, active=active)

    def _banned(self, step: int) -> torch.Tensor | None:
        """(B, V) bool: the ids that would end a row before its minimum."""
        rows = zip(self.params, self._stops, strict=True)
        ends = [stops if step < params.min_new_tokens else () for params, stops in rows]
        return banned_tokens(ends, vocab_size=self.model.config.vocab_size, device=self.model.device)


def encode_prompts(model: Transformer, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """Token ids of one or several prompts, checked against the vocabulary. Tensors and arrays of ids are taken too."""
    given = _plain(prompts)
    if isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], str | list)):
        given = [given]
    if not isinstance(given, list):
        raise ConfigError(f"prompts must be text, token ids, or a list of either; found {type(prompts).__name__}")
    if not given:
        raise ConfigError("no prompt was given")
    encoded = []
    for prompt in given:
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise ConfigError("this model's folder has no tokenizer: give the prompt as token ids")
            ids = model.tokenizer.encode(prompt)
            if not ids and model.tokenizer.bos_id is not None:
                ids = [model.tokenizer.bos_id]  # an empty prompt starts a text
        else:
            ids = prompt
        check_ids(model, ids)
        if not ids:
            raise ConfigError("a prompt is empty, and the tokenizer has no beginning-of-text token to start from")
        encoded.append(ids)
    return encoded


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists, also inside a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def end_ids(model: Transformer) -> frozenset[int]:
    """The ids that end a text: the tokenizer's, generation_config.json's and config.json's."""
    found: set[int] = set(model.tokenizer.eos_ids) if model.tokenizer is not None else set()
    for source in (model.generation, model.config.source):
        value = source.get("eos_token_id")
        found.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return frozenset(token for token in found if isinstance(token, int) and 0 <= token < model.config.vocab_size)


def fit(params: SamplingParams, prompt: int, model: Transformer) -> SamplingParams:
    """Shorten max_new_tokens to the positions that the model has left; ConfigError if the prompt takes them all."""
    left = model.config.max_positions - prompt
    if left < 1:
        raise ConfigError(
            f"the prompt has {prompt} tokens and the model {model.config.max_positions} positions; shorten the prompt"
        )
    if params.max_new_tokens <= left:
        return params
    return replace(params, max_new_tokens=left, min_new_tokens=min(params.min_new_tokens, left))


def _with(params: SamplingParams, settings: dict[str, Any]) -> SamplingParams:
    try:
        return replace(params, **settings)
    except TypeError as error:
        raise ConfigError(f"unknown sampling setting: {error}") from None
