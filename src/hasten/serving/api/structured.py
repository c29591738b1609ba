"""Structured output: a JSON schema becomes a constraint on every token, with llguidance.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of regular-expression derivatives; it computes
which tokens of the vocabulary may come next. Grammars are from strangers: they are compiled away from the event loop,
within limits of size, work and time. It fails closed: a keyword that is not understood is refused rather than skipped,
and a constraint that breaks half-way lets nothing but the end through and says so (`Grammar.error`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hasten.serving.api.errors import ApiError, overloaded
from hasten.serving.api.settings import ServerSettings

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from torch import Tensor

    from hasten.model.tokenizer import Tokenizer

# Without a bound a model that is unsure writes blanks until its length is used up.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"\n? {0,32}", "lenient": False}
KEPT = 64  # compiled grammars


class Grammar:
    """One sample's constraint (`hasten.serving.request.Constraint`); forks share `failures`."""

    def __init__(self, matcher: LLMatcher, *, vocabulary: int, eos_ids: tuple[int, ...], failures: list[str]) -> None:
        self._matcher, self._vocabulary, self._eos_ids, self._failures = matcher, vocabulary, eos_ids, failures
        self._words = np.empty((vocabulary + 31) // 32, dtype=np.uint32)
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether nothing more may come."""
        return self._ended or bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the output cannot be trusted, of this sample or one that was forked with it."""
        return self._failures[0] if self._failures else None

    def mask(self, row: Tensor) -> None:
        """Set the logits (V,) of tokens that may not come to -inf, in place."""
        import torch

        if not self.done:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._note()
        if self.done:  # the end, or an error: nothing but an end-of-text token
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
        """Take the token that was drawn."""
        if self.done or token in self._eos_ids:
            self._ended = True
            if not self._failures and not self._matcher.is_accepting():
                self._failures.append("the output ended before the structure was complete")
            return
        if not self._matcher.consume_token(token):
            self._note(f"token {token} does not fit the structure")

    def fork(self) -> Grammar:
        """An independent copy in the same state."""
        copy = Grammar(
            self._matcher.deep_copy(), vocabulary=self._vocabulary, eos_ids=self._eos_ids, failures=self._failures
        )
        copy._ended = self._ended
        return copy

    def _note(self, otherwise: str | None = None) -> None:
        if self._matcher.is_error() or otherwise:
            self._failures.append((self._matcher.get_error() or otherwise or "unknown")[:300])
            self._ended = True


class Grammars:
    """Compiles JSON schemas for one tokenizer, keeps the latest, and never on the caller's thread."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocabulary: int, eos_ids: Collection[int], settings: ServerSettings
    ) -> None:
        self._tokenizer, self._vocabulary, self._settings = tokenizer, vocabulary, settings
        self._eos_ids = tuple(sorted(eos_ids))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._waiting = 0

    async def constraint(self, schema: Mapping[str, Any] | bool, *, param: str) -> Grammar:
        """A fresh constraint to this JSON schema. Raises ApiError: 400 for a schema that is refused, 503 when busy."""
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
        return Grammar(matcher, vocabulary=self._vocabulary, eos_ids=self._eos_ids, failures=[])

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
            tokens = self._tokens
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        limits = LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000)
        matcher = LLMatcher(tokens, grammar, limits=limits, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()
