"""A conversation whose cache is kept from turn to turn: only what is new is computed."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from hasten.engine.cache import row_format
from hasten.engine.engine import Engine
from hasten.engine.for_texts import engine_for
from hasten.engine.generate import Generation, Timing
from hasten.engine.params import SamplingParams
from hasten.engine.prompts import fit
from hasten.engine.speculation import Accept, SpeculationStats, make_speculator
from hasten.errors import ConfigError
from hasten.model.fused import fuse_where_it_fits
from hasten.model.transformer import Transformer

_ROOM = 1024  # tokens that a conversation has room for at first


class Chat:
    """The history of one conversation, and the engine whose prefix cache holds its tokens.

    The model is fused first where it can be, as by `hasten.generate`. draft, speculate, accept: as there.
    chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}. Raises ConfigError at once
    if the model has no tokenizer or no chat template.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        system: str | None = None,
        kv_cache_dtype: Any = "auto",
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
        self._engine: Engine | None = None
        self.reused = 0  # tokens of the last prompt that were found in the cache, in whole blocks

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
        if self._engine is not None and not self._engine.idle:
            raise ConfigError("the last answer is still open: read it to its end or close it before the next turn")
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._encode(self.messages)
            params = fit(params, len(prompt), self.model)
            engine = self._with_room(len(prompt) + params.max_new_tokens)
            run = Generation(self.model, [prompt], params, engine=engine, timing=timing)
        except Exception:
            self.messages.pop()
            raise
        try:
            yield from run.texts()
        finally:
            (answer,) = run.results()
            self.reused = run.reused
            if not run.sound:
                self._engine = None
            self.messages.append({"role": "assistant", "content": answer.text})

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.tokenizer.encode_chat(messages, chat_template_kwargs=self.chat_template_kwargs)

    def _with_room(self, tokens: int) -> Engine:
        """The engine, with room for a text of this length: twice as much when it must grow, its contents kept."""
        if self._engine is None:
            room = min(max(tokens, _ROOM), self.model.config.max_positions)
            self._engine = engine_for(
                self.model,
                [room],
                kv_cache_dtype=self.kv_cache_dtype,
                speculator=self._speculator,
                prefix_cache=True,
            )
        elif tokens > self._engine.max_length:
            self._engine.grow(min(max(tokens, 2 * self._engine.max_length), self.model.config.max_positions))
        return self._engine
