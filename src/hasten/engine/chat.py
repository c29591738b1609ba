"""A conversation whose cache is kept from turn to turn: only what is new is computed."""

from collections.abc import Generator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from hasten.engine.cache import row_format
from hasten.engine.decoder import Decoder
from hasten.engine.generate import Generation, Timing
from hasten.engine.graphs import fastest_decoder
from hasten.engine.params import SamplingParams
from hasten.engine.prompts import fit
from hasten.engine.speculation import Accept, SpeculationStats, make_speculator
from hasten.errors import ConfigError
from hasten.model.fused import fuse_where_it_fits
from hasten.model.transformer import Transformer


class Chat:
    """The history of one conversation and the cache that holds its tokens.

    The model is fused first where it can be, as by `hasten.generate`. draft, speculate, accept: as there.
    chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}. Raises ConfigError at once
    if the model has no tokenizer or no chat template.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        system: str | None = None,
        kv_cache_dtype: str = "auto",
        draft: str | Path | Transformer = "none",
        speculate: int | None = None,
        accept: Accept = "exact",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if model.tokenizer is None:
            raise ConfigError("this model's folder has no tokenizer; a chat needs one")
        self.model = fuse_where_it_fits(model)
        self.tokenizer = model.tokenizer
        self.messages: list[dict[str, Any]] = []
        self.system = system
        row_format(kv_cache_dtype)  # refuses an unknown one now
        self.kv_cache_dtype = kv_cache_dtype
        self.clear()
        self._speculator = make_speculator(model, draft, speculate=speculate, accept=accept)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._encode([{"role": "user", "content": "?"}])  # refuses a model without a template now
        self._decoder: Decoder | None = None
        self._cached: list[int] = []  # the ids whose keys and values are in the cache
        self.reused = 0  # tokens of the last prompt that were found in the cache

    @property
    def drafts(self) -> SpeculationStats | None:
        """What drafts gave so far, where some were proposed."""
        found = None if self._speculator is None else self._speculator.stats
        return found if found is not None and found.draft_tokens else None

    def clear(self) -> None:
        """Forget the conversation (the system message stays)."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str, params: SamplingParams, *, timing: Timing | None = None) -> Generator[str, None, None]:
        """Send the user's text and yield the answer piece by piece.

        Closing the iterator early (or Ctrl-C) ends the answer; what was said so far stays in the history. If the
        conversation no longer fits the model's positions, ConfigError says so and the turn is taken back.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._encode(self.messages)
            params = fit(params, len(prompt), self.model)
            decoder = self._with_room(len(prompt) + params.max_new_tokens)
        except Exception:
            self.messages.pop()
            raise
        # At least the last token is computed again: its logits are needed.
        self.reused = min(_common(self._cached, prompt), len(prompt) - 1)
        if decoder.forgets(0, self.reused):
            self.reused = 0
        decoder.truncate(self.reused)
        self._cached = self._cached[: self.reused]
        run = Generation(
            self.model,
            [prompt],
            params,
            decoder=decoder,
            reused=self.reused,
            timing=timing,
            speculator=self._speculator,
        )
        try:
            yield from run.texts()
        finally:
            (answer,) = run.results()
            # The cache holds the prompt and what was decoded; the newest token is not in it yet.
            self._cached = [*prompt, *answer.tokens][: decoder.lengths[0]]
            self.messages.append({"role": "assistant", "content": answer.text})

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.tokenizer.encode_chat(messages, chat_template_kwargs=self.chat_template_kwargs)

    def _with_room(self, tokens: int) -> Decoder:
        """The decoder, with a cache of at least `tokens` tokens: doubled when it must grow, its contents kept."""
        if self._decoder is None:
            capacity = min(max(tokens, 1024), self.model.config.max_positions)
            self._decoder = fastest_decoder(self.model, batch=1, capacity=capacity, kv_cache_dtype=self.kv_cache_dtype)
        elif tokens > self._decoder.cache.capacity:
            capacity = min(max(tokens, 2 * self._decoder.cache.capacity), self.model.config.max_positions)
            self._decoder.cache.grow(capacity)
        return self._decoder


def _common(a: list[int], b: list[int]) -> int:
    """How many ids they have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
