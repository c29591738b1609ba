"""State that the endpoints share: the engine, facts about the model, the threads that prepare requests."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from hasten.server.bodies import ModelBody, RequestBody
from hasten.server.errors import ApiError, overloaded
from hasten.server.metrics import Metrics
from hasten.server.settings import ServerSettings
from hasten.server.structured import Grammars
from hasten.text.answer_format import AnswerFormat, find_answer_format
from hasten.text.markers import squash
from hasten.text.response_template import read_response_template

if TYPE_CHECKING:
    from fastapi import Request as HttpRequest
    from torch import Tensor

    from hasten.engine.request import Request, RequestOutput
    from hasten.engine.settings import ModelFacts, Stats
    from hasten.engine.watch import Watched
    from hasten.text.chat import ChatTemplate
    from hasten.text.tokenizer import Tokenizer

Result = TypeVar("Result")

# Shorter texts are encoded on the event loop: a thread switch takes longer.
SHORT_TEXT = 2000
NAMED = 16  # maximum number of ignored fields that a response names
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AnyEngine(Protocol):
    """The engine's interface: `hasten.engine.async_engine.AsyncEngine`, or replicas of it (`hasten.replicas`).

    watch: None where the blocks are in other processes.
    """

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    def replica_stats(self) -> dict[str, Stats]: ...

    def generate(self, *requests: Request) -> AsyncGenerator[RequestOutput]: ...

    async def embed(
        self, prompts: Sequence[Sequence[int]], *, pooling: str, adapter: str, timeout: float | None
    ) -> Tensor: ...

    async def load_adapter(self, name: str, folder: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    def watch(self) -> AbstractAsyncContextManager[Watched] | None: ...

    async def close(self) -> None: ...


class Service:
    """One served model.

    max_length: tokens of prompt and answer together. vocabulary: the number of logits. models: the names that requests
    may give, the model's own and then its adapters'.
    """

    def __init__(self, engine: AnyEngine, *, model_name: str, settings: ServerSettings) -> None:
        self.engine, self.model_name, self.settings = engine, model_name, settings
        self.facts = facts = engine.facts
        self._tokenizer = facts.tokenizer
        self.max_length, self.vocabulary = facts.max_length, facts.vocabulary
        self.models = [model_name, *facts.adapters]
        self.created = int(time.time())
        self.ready = False
        self.draining = False
        self.in_flight = 0  # requests that a shutdown waits for
        self.metrics = Metrics(model_name, engine.replica_stats)
        self.grammars = Grammars(facts.tokenizer, vocabulary=self.vocabulary, eos_ids=facts.eos_ids, settings=settings)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._numbers = itertools.count()
        self._formats: dict[ChatTemplate, AnswerFormat] = {}
        self._longest = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError (400) where the model's folder has none."""
        if self._tokenizer is None:
            raise ApiError("this model's folder has no tokenizer; send the prompt to /v1/completions as token ids")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    async def answer_format(self, *, tools: bool) -> AnswerFormat:
        """How answers in the model's chat template are written, found at the first request. tools: with functions."""
        templates = self.tokenizer.templates
        template = (templates.get("tool_use") if tools else None) or templates.get("default")
        if template is None:
            return AnswerFormat()
        if template not in self._formats:  # a template is a program: it never runs on the event loop
            work = partial(find_answer_format, template, special_tokens=self.tokenizer.special_tokens)
            found = await self.in_thread(work)
            if found.calls is None or found.reasoning is None:  # a declaration knows what the template does not show
                declared = read_response_template(self.tokenizer.response_template)
                calls, reasoning = found.calls or declared.calls, found.reasoning or declared.reasoning
                found = replace(found, calls=calls, reasoning=reasoning)
            self._formats[template] = replace(found, special=self.any_special(found.markers(calls=False)))
        return self._formats[template]

    def any_special(self, marks: Sequence[str]) -> bool:
        """Whether a special token is, or is part of, one of these marks, which have no white space."""
        return any(token in mark for token in self._special for mark in marks)

    @cached_property
    def _special(self) -> list[str]:
        """The texts of the special tokens, without white space."""
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        return [text for token in added if token.special and (text := squash(token.content))]

    def check_model(self, name: str | None) -> str:
        """Return the adapter of that name, or "" for the model itself (or None). Raises ApiError (404) if unknown.

        `:latest`, the tag that Ollama's clients add to every name, is dropped.
        """
        if name is None:
            return ""
        found = name if name in self.models else name.removesuffix(":latest")
        if found not in self.models:
            served = ", ".join(map(repr, self.models))
            message = f"the model {name[:200]!r} does not exist here; served: {served}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return "" if found == self.model_name else found

    def check_in(self, body: ModelBody, http: HttpRequest, *, without_effect: Sequence[str] = ()) -> None:
        """Check the fields, the model's name and the engine at the start of a request; note the user for its log."""
        self.note_ignored(body, http, without_effect=without_effect)
        if "model" not in body.model_fields_set:
            body.model = self.model_name
        self.check_model(body.model)
        if not self.engine.healthy:
            raise overloaded(f"the engine has failed: {self.engine.error}", seconds=30)
        if body.user is not None:
            http.state.facts["user"] = body.user

    def note_ignored(self, body: RequestBody, http: HttpRequest, *, without_effect: Sequence[str] = ()) -> None:
        """Note the unknown fields of a request for its log line and the response header `x-hasten-ignored`.

        without_effect: known ones that this server cannot follow. Raises ApiError for the first one with
        `strict_fields`, and for one that could not be a field's name.
        """
        names = [*(body.model_extra or ()), *without_effect]
        for name in names:
            if self.settings.strict_fields or not _PLAIN_NAME.fullmatch(name):
                raise ApiError(f"{name[:100]}: there is no such field", param=name[:100], code="unknown_parameter")
        if names:
            http.state.facts["ignored"] = ",".join(names[:NAMED])

    def number(self) -> int:
        """A number that is unique to this request in the process."""
        return next(self._numbers)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, so that it does not block the event loop; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text from a request; a text that cannot fit is refused before it is encoded."""
        tokenizer = self.tokenizer
        if not self._longest:
            self._longest = max((len(token.encode()) for token in tokenizer.backend.get_vocab(True)), default=1)
        least = -(-len(text) // self._longest)
        if least > self.max_length:
            raise too_long(f"at least {least:,}", self.max_length, param=param)

        work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return work() if len(text) < SHORT_TEXT else await self.in_thread(work)

    async def drain(self, timeout: float, *, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new requests and wait for those in flight; returns whether they ended within `seconds`."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.in_flight and not given_up():
                    await asyncio.sleep(0.01)
        return not self.in_flight

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()


def too_long(tokens: int | str, most: int, *, param: str) -> ApiError:
    """The 400 for a prompt that is too long, with the code that OpenAI's clients know."""
    count = tokens if isinstance(tokens, str) else f"{tokens:,}"
    message = f"the prompt has {count} tokens; this server's limit is {most:,} tokens of prompt and answer together"
    return ApiError(message, param=param, code="context_length_exceeded")
