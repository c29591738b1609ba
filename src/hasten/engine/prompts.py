"""What generation and serving are asked: prompts as token ids, the parameters of each, and what ends a text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hasten.engine.params import SamplingParams
from hasten.errors import ConfigError
from hasten.model.transformer import Transformer

Prompt = str | Sequence[int]


def check_ids(model: Transformer, ids: object) -> None:
    """Raise ConfigError unless ids are integers inside the model's vocabulary."""
    if not isinstance(ids, Sequence):
        raise ConfigError(f"token ids must be a list of integers; found {ids!r:.40}")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < model.config.vocab_size:
        return
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"token ids must be integers; found {token!r:.40}")
        if not 0 <= token < model.config.vocab_size:
            raise ConfigError(f"token id {token} is outside the vocabulary of {model.config.vocab_size}")


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
    if isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return list(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, *, prompts: int, **settings: Any
) -> list[SamplingParams]:
    """The parameters of each prompt: given for all of them, one for each, or by default; settings replace fields."""
    given: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * prompts
    rows: list[SamplingParams] = [SamplingParams() if row is None else row for row in given]
    if len(rows) != prompts:
        raise ConfigError(f"{len(rows)} sampling parameters were given for {prompts} prompts")
    if not all(isinstance(row, SamplingParams) for row in rows):
        raise ConfigError(f"params must be SamplingParams, or a list of them; found {params!r:.80}")
    try:
        return [replace(row, **settings) for row in rows] if settings else rows
    except TypeError as error:
        raise ConfigError(f"unknown sampling setting: {error}") from None


def end_ids(model: Transformer) -> frozenset[int]:
    """The ids that end a text: the tokenizer's, generation_config.json's and config.json's."""
    found: set[int] = set(model.tokenizer.eos_ids) if model.tokenizer is not None else set()
    for source in (model.generation, model.config.source):
        value = source.get("eos_token_id")
        found.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return frozenset(token for token in found if isinstance(token, int) and 0 <= token < model.config.vocab_size)


def fit(params: SamplingParams, prompt: int, model: Transformer, *, length: int | None = None) -> SamplingParams:
    """Shorten max_new_tokens to what is left of `length` tokens (by default the model's positions).

    ConfigError if the prompt takes them all, or for stop strings without a tokenizer.
    """
    if params.stop and model.tokenizer is None:
        raise ConfigError("stop strings need text, and this model's folder has no tokenizer; use stop_token_ids")
    left = (length or model.config.max_positions) - prompt
    if left < 1:
        raise ConfigError(
            f"the prompt has {prompt} tokens and the model {model.config.max_positions} positions; shorten the prompt"
        )
    if params.max_new_tokens <= left:
        return params
    return replace(params, max_new_tokens=left, min_new_tokens=min(params.min_new_tokens, left))
