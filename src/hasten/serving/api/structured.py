"""Structured output: a JSON schema becomes a constraint on every token, with llguidance.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of regular-expression derivatives; it computes
which tokens of the vocabulary may come next. Grammars are from strangers: they are compiled and rehearsed away from the
event loop and the engine, within limits of size, work and time, by threads that give way to both. It fails closed: a
keyword of JSON schema that is not supported is refused rather than skipped, and a constraint that breaks half-way lets
nothing but the end through and says so (`Grammar.error`).
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from hasten.serving.api.errors import ApiError, overloaded
from hasten.serving.api.grammar import Grammar, error_of, limits, rehearse
from hasten.serving.api.settings import ServerSettings

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from hasten.model.tokenizer import Tokenizer

# Without a bound a model that is unsure writes blanks until its length is used up.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"\n? {0,32}", "lenient": False}
KEPT = 64  # compiled grammars


class Grammars:
    """Compiles JSON schemas for one tokenizer, keeps the latest, and never on the caller's thread."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocabulary: int, eos_ids: Collection[int], settings: ServerSettings
    ) -> None:
        self._tokenizer, self._vocabulary, self._settings = tokenizer, vocabulary, settings
        self._eos_ids = tuple(sorted(eos_ids))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar", initializer=_give_way)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._closing: list[int] = []  # tokens that end something in JSON
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._waiting = 0

    async def constraint(self, schema: Mapping[str, Any] | bool, *, param: str) -> Grammar:
        """A fresh constraint to this JSON schema. Raises ApiError: 400 for a schema that is refused, 503 when busy."""
        if isinstance(schema, bool):  # JSON schema's words for anything, and for nothing
            if not schema:
                raise ApiError(f"{param}: the JSON schema false allows nothing", param=param)
            schema = {}
        text = json.dumps(schema, sort_keys=False)
        if len(text) > self._settings.schema_bytes:
            most = self._settings.schema_bytes
            raise ApiError(f"{param}: the JSON schema has {len(text):,} bytes; at most {most:,}", param=param)
        if self._tokenizer is None:
            raise ApiError("structured output needs a tokenizer, which this model's folder does not have", param=param)
        if not self._eos_ids:
            message = "structured output needs an end-of-text token, which this model does not have"
            raise ApiError(message, param=param)
        if self._waiting >= 64:
            raise overloaded("too many JSON schemas wait to be compiled")
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, text)
        work.add_done_callback(self._ready)
        try:
            matcher = await asyncio.wait_for(asyncio.shield(work), self._settings.grammar_timeout)
        except TimeoutError:
            seconds = self._settings.grammar_timeout
            raise ApiError(f"{param}: the JSON schema was not compiled within {seconds:g} s", param=param) from None
        except ValueError as error:
            raise ApiError(f"{param}: the JSON schema is refused: {error}"[:500], param=param) from None
        return Grammar(matcher, vocabulary=self._vocabulary, eos_ids=self._eos_ids, param=param, failures=[])

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ready(self, work: asyncio.Future[LLMatcher]) -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()  # seen: nobody may be waiting any more

    def _compile(self, text: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found.deep_copy()
            if self._tokens is None:
                assert self._tokenizer is not None
                backend = self._tokenizer.backend.to_str()
                self._tokens = LLTokenizer(backend, n_vocab=self._vocabulary, eos_token=list(self._eos_ids))
                self._closing = [i for mark in '"}],:' for i in self._tokens.tokenize_str(mark)]
            tokens = self._tokens
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        matcher = LLMatcher(tokens, grammar, limits=limits(), log_level=0)
        if wrong := error_of(matcher):
            raise ValueError(wrong)
        seconds = self._settings.grammar_timeout / 10
        rehearse(matcher, vocabulary=self._vocabulary, closing=self._closing, seconds=seconds)
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()


def _give_way() -> None:
    """Whoever computes for everybody goes first. Linux counts the niceness of each thread by itself."""
    if hasattr(os, "setpriority") and hasattr(threading, "get_native_id"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
