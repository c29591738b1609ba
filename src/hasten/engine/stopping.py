"""From token ids to text that may be shown: whole characters only, and nothing of a stop string.

Pure Python, one token at a time, at a cost per token that does not grow with the text.
"""

import codecs
import functools
import json
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

from hasten.engine.params import SamplingParams
from hasten.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]

# Tokens before the new one that are decoded with it, so that it is rendered as in the middle of a text.
_CONTEXT_TOKENS = 4
_BYTE_TOKEN = re.compile("<0x[0-9a-fA-F]{2}>")


class TextStream:
    """Decodes one token at a time; the pieces put together equal `tokenizer.decode` of all the ids.

    A piece holds whole characters that no later token can change. Two kinds of decoder need care:

    - Byte-level (GPT-2, Llama 3, Qwen): every token is a string of bytes and a character may span tokens. An
      incremental UTF-8 decoder gives each character when its last byte arrives, and U+FFFD as soon as bytes cannot
      become one.
    - Byte fallback (Llama 2, Mistral, Gemma): tokens are text, but rare characters come as a run of tokens such as
      <0xE2>. The library decodes a run as a whole, and one bad byte turns all of it into U+FFFD; so a run is held
      until another kind of token ends it.

    context: ids before the first (the prompt), so that a text that goes on keeps its leading space, which decoders of
    the sentencepiece kind take off the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        own = _facts_of(tokenizer)
        self._tokenizer, self._facts = tokenizer, own
        self._skipped = own.special if skip_special_tokens else frozenset[int]()
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if own.byte_level else None
        self._context = [i for i in context[-8 * _CONTEXT_TOKENS :] if self._token(i) is not None][-_CONTEXT_TOKENS:]
        self._held: list[int] = []  # a run of byte tokens that has not ended

    def push(self, token_id: int) -> str:
        """Take the next id; give the text that is now final (often empty)."""
        if token_id in self._skipped:
            return ""
        text = self._facts.texts[token_id]
        if self._bytes is not None:
            if text is None or self._bytes.getstate()[0]:
                return self._bytes.decode(self._facts.bytes[token_id])
            return text
        token = self._facts.tokens[token_id]
        if token is None:
            return ""
        if text is not None and not self._held and self._context and self._facts.tokens[self._context[-1]]:
            self._context = [*self._context[1 - _CONTEXT_TOKENS :], token_id]
            return text
        self._held.append(token_id)
        if self._facts.has_fallback and is_byte_token(token):
            return ""
        return self._release()

    def flush(self) -> str:
        """The rest of the text, when no token follows. Bytes of an unfinished character become U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._release() if self._held else ""

    def _token(self, token_id: int) -> str | None:
        """The token's own string; None for what decoding leaves out: skipped and unknown ids."""
        return None if token_id in self._skipped else self._facts.tokens[token_id]

    def _release(self) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        self._context = (self._context + self._held)[-_CONTEXT_TOKENS:]
        self._held = []
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""  # skipped ids are out already


class _Facts:
    """What the tokens of a tokenizer are by themselves, found out once for all its streams.

    tokens: their strings; None for an unknown id. bytes: of a byte-level tokenizer. texts: in the middle of a text
    where no character is incomplete; None where that depends on others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        steps = decoder_steps(tokenizer)
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.byte_level = is_byte_level(steps)
        self.has_fallback = any(step.get("type") == "ByteFallback" for step in steps)
        self._replaced = _replaced(steps)
        self._byte_of = byte_level_alphabet() if self.byte_level else {}
        self.tokens: _Table[str | None] = _Table(tokenizer.backend.id_to_token)
        self.bytes: _Table[bytes] = _Table(lambda token_id: token_bytes(self.tokens[token_id] or "", self._byte_of))
        self.texts: _Table[str | None] = _Table(self._text_of)

    def _text_of(self, token_id: int) -> str | None:
        if self.byte_level:
            try:
                return self.bytes[token_id].decode()
            except UnicodeDecodeError:
                return None
        token = self.tokens[token_id]
        return token.replace(*self._replaced) if token and self._replaced and not is_byte_token(token) else None


Value = TypeVar("Value")


class _Table(dict[int, Value]):
    """Values by token id, each computed when it is first looked up."""

    def __init__(self, find: Callable[[int], Value]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> Value:
        found = self[token_id] = self._find(token_id)
        return found


_facts: weakref.WeakKeyDictionary[Tokenizer, _Facts] = weakref.WeakKeyDictionary()


def _facts_of(tokenizer: Tokenizer) -> _Facts:
    found = _facts.get(tokenizer)
    if found is None:
        found = _facts[tokenizer] = _Facts(tokenizer)
    return found


def _replaced(steps: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """What such a decoder replaces in each token, by what, where that is all that it does in the middle of a text.

    The decoder of Llama 2, Mistral and Gemma: Replace, ByteFallback, Fuse and perhaps a Strip at the beginning.
    """
    replace, *others = steps or [{}]
    kinds = [step.get("type") for step in others]
    if replace.get("type") != "Replace" or kinds[:2] != ["ByteFallback", "Fuse"] or kinds[2:] not in ([], ["Strip"]):
        return None
    if others[2:] and others[2].get("stop"):
        return None
    pattern, content = replace.get("pattern", {}).get("String"), replace.get("content")
    return (pattern, content) if pattern and content else None


class StopStrings:
    """Cuts a text at the first stop string, and holds back what could become one.

    The match that completes first wins; of those that complete at the same character, the one that began first (the
    longest). The stop string and what follows are never shown. At most `longest stop string - 1` characters are held.
    """

    def __init__(self, stop: Collection[str]) -> None:
        assert all(stop), "SamplingParams refuses an empty stop string"
        self._stop = stop
        self._held = ""
        self.found: str | None = None  # the stop string that came

    def push(self, piece: str) -> tuple[str, bool]:
        """Take more text; give what may be shown, and whether a stop string was found (then nothing more comes)."""
        if not self._stop:
            return piece, False
        if self.found is not None:
            return "", True
        text = self._held + piece
        places = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            _, shown, self.found = min(places)
            self._held = ""
        else:
            shown = min((_beginning(stop, text) for stop in self._stop), default=len(text))
            self._held = text[shown:]
        return text[:shown], self.found is not None

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """One output from its first token to its end: decoding, stop strings, end-of-text ids and the length limit.

    finish_reason "stop": an end-of-text id, one of `stop_token_ids`, or a stop string. "length": `max_new_tokens` came
    first. The id that ends the output adds no text. `ignore_eos` keeps `stop_token_ids` and stop strings in force.
    tokenizer None (a folder without one): no text, and no stop strings.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: Collection[int],
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._params = params
        self.stop_ids = stop_ids(params, eos_ids=eos_ids)
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens, context=context)
        self._strings = StopStrings(params.stop)
        self.count = 0  # tokens taken
        self.finish_reason: FinishReason | None = None
        self._ended_by: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string that ended the output, or the one of `stop_token_ids`; None for all other ends."""
        return self._strings.found if self._ended_by is None else self._ended_by

    def push(self, token_id: int) -> str:
        """Take the next id; give the text that may be shown now (often empty). Not after a finish reason was given."""
        assert self.finish_reason is None, "the output has ended"
        self.count += 1
        if token_id in self.stop_ids and self.count > self._params.min_new_tokens:
            self._ended_by = token_id if token_id in self._params.stop_token_ids else None
            return self.finish("stop")
        text, stopped = self._strings.push("" if self._stream is None else self._stream.push(token_id))
        if stopped:
            self.finish_reason = "stop"
        elif self.count >= self._params.max_new_tokens:
            text += self.finish("length")
        return text

    def go_on(self, token_id: int) -> str:
        """`push` of an id that cannot end the output: not the last, not in `stop_ids`, and without stop strings."""
        self.count += 1
        return "" if self._stream is None else self._stream.push(token_id)

    def finish(self, reason: FinishReason) -> str:
        """End the output from outside (a constraint is fulfilled); give the text that was still held back."""
        text, stopped = self._strings.push("" if self._stream is None else self._stream.flush())
        self.finish_reason = "stop" if stopped else reason
        return text + self._strings.flush()


def stop_ids(params: SamplingParams, *, eos_ids: Collection[int]) -> frozenset[int]:
    """The ids that end an output; before `min_new_tokens` they are the ones to ban from sampling."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_ids)


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    """What the tokenizer's decoder does, as it writes itself to a file."""
    decoder = tokenizer.backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    return list(state.get("decoders", [state]))


def is_byte_level(steps: Sequence[dict[str, object]]) -> bool:
    """Whether every token is a string of bytes (GPT-2, Llama 3, Qwen)."""
    return [step.get("type") for step in steps] == ["ByteLevel"]


def is_byte_token(token: str) -> bool:
    """Whether a token is the name of one byte, such as <0xE2>."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def token_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes of a byte-level token in this alphabet."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019): printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _beginning(stop: str, text: str) -> int:
    """Where a stop string may have begun that the text does not hold whole; the text's end: nowhere."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) if at < 0 else at
