"""Structured output: a JSON schema becomes a constraint on every token, with llguidance.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of regular-expression derivatives; it computes
which tokens of the vocabulary may come next. Grammars are untrusted: they are compiled and rehearsed in
low-priority threads, apart from the event loop and the engine, within limits of size, work and time. It fails closed:
an unsupported keyword of JSON schema is refused, not skipped, and a constraint that breaks half-way allows only the end
of the text and reports it (`Grammar.error`).

The cost of a schema shows only in its masks, which are computed in the engine's thread, where all requests wait. So
there are three bounds: the library's own limits on each step (`LIMITS`), a rehearsal in which most schemas that cannot
work fail (`rehearse`), and a budget of computing time for each token.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hasten.server.errors import ApiError, overloaded
from hasten.server.settings import ServerSettings

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from numpy.typing import NDArray
    from torch import Tensor

    from hasten.text.tokenizer import Tokenizer

# Unbounded, an unsure model writes blanks until its maximum length.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"\n? {0,32}", "lenient": False}
KEPT = 64  # compiled grammars
# Work in llguidance's units: a lexer's fuel is some 50,000 a millisecond at first and 14,000 later.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
PER_TOKEN = 0.01  # seconds of computing that each token adds to a request's budget
ALLOWANCE = 0.2  # the budget at the start, and its maximum
WALKS, STEPS, FIRST = 4, 32, 16  # of the rehearsal: walks, tokens of each, and first tokens that are tried one by one


def error_of(matcher: LLMatcher) -> str:
    """The matcher's error in one line, or "". ("NoExtension…" means that no text satisfies the grammar.)"""
    lines = matcher.get_error().strip().splitlines() if matcher.is_error() else []
    if not lines:
        return ""
    return "nothing can fit it" if lines[0].startswith("NoExtension") else lines[0][:300]


def rehearse(matcher: LLMatcher, *, vocabulary: int, closing: Sequence[int], seconds: float) -> None:
    """Follow the grammar for some steps, at most `seconds` seconds. Raises ValueError where it breaks.

    Samples allowed tokens, always the same ones; half of the time `closing` ones (quotes, brackets), so that the walk
    leaves free text and reaches later fields. The matcher itself is not changed.
    """
    words = np.empty((vocabulary + 31) // 32, dtype=np.uint32)
    end, draw = time.monotonic() + seconds, random.Random(0)

    def allowed(trial: LLMatcher) -> NDArray[np.uint8]:
        trial.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _check(trial)
        return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocabulary)

    def take(trial: LLMatcher, token: int) -> bool:
        trial.consume_token(token)
        _check(trial)
        return not trial.is_stopped() and time.monotonic() < end

    first = np.flatnonzero(allowed(matcher.deep_copy()))
    for token in first[:: max(1, len(first) // FIRST)]:
        trial = matcher.deep_copy()
        if take(trial, int(token)):
            allowed(trial)
    for _ in range(WALKS):
        trial = matcher.deep_copy()
        for _ in range(STEPS):
            mask = allowed(trial)
            tokens = np.array([token for token in closing if mask[token]])
            if not len(tokens) or draw.random() < 0.5:
                tokens = np.flatnonzero(mask)
            if not len(tokens) or not take(trial, int(tokens[draw.randrange(len(tokens))])):
                break


def _check(matcher: LLMatcher) -> None:
    if found := error_of(matcher):
        raise ValueError(found)


# Keywords of JSON Schema that hold schemas: one, a list, or an object of them by name.
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def without_unknown_formats(schema: Any) -> Any:
    """The schema without each `format` that llguidance does not know: an annotation, as JSON Schema says."""
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and not _knows_format(value):
            continue
        if key in _LISTED and isinstance(value, list):
            value = [without_unknown_formats(item) for item in value]
        elif key in _NAMED and isinstance(value, dict):
            value = {name: without_unknown_formats(item) for name, item in value.items()}
        elif key in _ONE:
            value = without_unknown_formats(value)
        kept[key] = value
    return kept


@functools.lru_cache(1024)
def _knows_format(name: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}), overrides=JSON_OPTIONS)
    return not LLMatcher.validate_grammar(grammar)


class Grammar:
    """One sample's constraint (`hasten.engine.request.Constraint`); forks share `failures`.

    schema: the JSON it was made of; param: the field of the request that it comes from.
    """

    def __init__(
        self, matcher: LLMatcher, *, vocabulary: int, eos_ids: tuple[int, ...], schema: str, param: str
    ) -> None:
        self._matcher, self._vocabulary, self._eos_ids = matcher, vocabulary, eos_ids
        self.schema, self.param = schema, param
        self._failures: list[str] = []
        self._left = ALLOWANCE
        self._words = np.empty((vocabulary + 31) // 32, dtype=np.uint32)
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether the text is complete and no token may follow."""
        return self._ended or bool(self._matcher.is_stopped())

    @property
    def grammar(self) -> Grammar:
        """Itself, under the name by which every constraint of the server gives its grammar."""
        return self

    @property
    def error(self) -> str | None:
        """Why the output of this sample, or of one forked from it, may violate the schema, or None."""
        return self._failures[0] if self._failures else None

    def mask(self, row: Tensor) -> None:
        """Set the logits (V,) of tokens that are not allowed to -inf, in place."""
        import torch

        if not self.done:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._note()
            self._pay(time.thread_time() - started)
        if self.done:  # at the end or after an error only an end-of-text token may come
            ends = [i for i in self._eos_ids if i < row.shape[0]]
            kept = row[ends].clone()
            row.fill_(-torch.inf)
            row[ends] = kept.nan_to_num(neginf=0.0) if bool(torch.isinf(kept).all()) else kept
            return
        allowed = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=self._vocabulary)
        banned = torch.from_numpy(allowed == 0)
        row[: self._vocabulary].masked_fill_(banned.to(row.device), -torch.inf)
        row[self._vocabulary :] = -torch.inf

    def advance(self, token: int) -> None:
        """Advance by the sampled token."""
        if self.done or token in self._eos_ids:
            self._ended = True
            if not self._failures and not self._matcher.is_accepting():
                self._failures.append("the output ended before the structure was complete")
            return
        started = time.thread_time()
        if not self._matcher.consume_token(token):
            self._note(f"token {token} does not fit the structure")
        self._pay(time.thread_time() - started - PER_TOKEN)

    def fork(self) -> Grammar:
        """An independent copy in the same state."""
        fork = copy.copy(self)
        fork._matcher, fork._words = self._matcher.deep_copy(), self._words.copy()
        return fork

    def _note(self, otherwise: str | None = None) -> None:
        if self._matcher.is_error() or otherwise:
            self._failures.append(error_of(self._matcher) or otherwise or "unknown")
            self._ended = True

    def _pay(self, seconds: float) -> None:
        """Charge the time of a mask to this request's budget: all requests wait for it, so slow masks end their own."""
        self._left = min(ALLOWANCE, self._left - seconds)
        if self._left < 0 and not self.done:
            self._failures.append(f"it takes more than {PER_TOKEN * 1000:g} ms of computing for a token")
            self._ended = True


class Grammars:
    """Compiles JSON schemas for one tokenizer, on threads of its own, and caches the latest."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocabulary: int, eos_ids: Collection[int], settings: ServerSettings
    ) -> None:
        self._tokenizer, self._vocabulary, self._settings = tokenizer, vocabulary, settings
        self._eos_ids = tuple(sorted(eos_ids))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar", initializer=_lower_priority)
        self._compiled = functools.lru_cache(KEPT)(self._start)
        self._lock = threading.Lock()  # of the tokens
        self._waiting = 0

    async def constraint(self, schema: Mapping[str, Any] | bool, *, param: str) -> Grammar:
        """A fresh constraint to this JSON schema. Raises ApiError: 400 for a schema that is refused, 503 when busy."""
        if isinstance(schema, bool):  # JSON schema for anything, and for nothing
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
        try:
            if "_tokens" not in vars(self):
                # Takes seconds for 262,144 words and holds Python's lock meanwhile. So it runs on a thread of normal
                # priority, since the whole server waits for it, and does not count as the schema's time.
                await asyncio.to_thread(self._prepare)
            work = self._compiled(text)
            matcher = await asyncio.wait_for(asyncio.shield(work), self._settings.grammar_timeout)
        except TimeoutError:
            seconds = self._settings.grammar_timeout
            raise ApiError(f"{param}: the JSON schema was not compiled within {seconds:g} s", param=param) from None
        except ValueError as error:
            raise ApiError(f"{param}: the JSON schema is refused: {error}"[:500], param=param) from None
        return Grammar(
            matcher.deep_copy(), vocabulary=self._vocabulary, eos_ids=self._eos_ids, schema=text, param=param
        )

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, text: str) -> asyncio.Future[LLMatcher]:
        """Compile a schema, or wait for it: requests with the same schema share the result or the refusal."""
        if self._waiting >= 64:
            raise overloaded("too many JSON schemas wait to be compiled")
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, text)
        work.add_done_callback(self._ready)
        return work

    def _ready(self, work: asyncio.Future[LLMatcher]) -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()  # mark it as retrieved: its request may be gone

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        assert self._tokenizer is not None
        backend = self._tokenizer.backend.to_str()
        return LLTokenizer(backend, n_vocab=self._vocabulary, eos_token=list(self._eos_ids))

    def _prepare(self) -> None:
        with self._lock:
            self._tokens  # noqa: B018

    def _compile(self, text: str) -> LLMatcher:
        tokens = self._tokens
        schema = without_unknown_formats(json.loads(text))
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
        matcher = LLMatcher(tokens, grammar, limits=LLParserLimits(**LIMITS), log_level=0)
        if wrong := error_of(matcher):
            raise ValueError(wrong)
        closing = [i for mark in '"}],:' for i in tokens.tokenize_str(mark)]
        seconds = self._settings.grammar_timeout / 10
        rehearse(matcher, vocabulary=self._vocabulary, closing=closing, seconds=seconds)
        return matcher


def _lower_priority() -> None:
    """Lower this thread's priority below the engine's. On Linux niceness is counted by thread."""
    if hasattr(os, "setpriority") and hasattr(threading, "get_native_id"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def grammar_of(constraint: object) -> Grammar | None:
    """The grammar to which a constraint of the server holds an answer; None where it has none, or there is none."""
    found: Grammar | None = getattr(constraint, "grammar", None)
    return found
