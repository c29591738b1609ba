"""Arguments of a call, in the forms that templates write them, as JSON text that goes on as they come.

Each reader's `take` gets what has come and is not consumed yet, and returns the JSON that is certain, how much was
consumed, and whether the arguments are complete.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from string import hexdigits
from typing import Any

from hasten.text.markers import MAYBE, NO, Pattern, find, match, match_pattern

_WORD = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+-")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_QUOTED = '"\\bfnrt'  # what may follow a backslash in JSON and in Python
_ESCAPES = {"x": 2, "u": 4}  # of Python, with the number of their digits
_BEHIND_TEXT = ",)]}:"
_LONGEST = 256  # characters of a word or a key
_SPACES = re.compile(rf"\s{{0,{_LONGEST}}}")
_LITERAL = 10_000  # most characters of a value that is read as Python
Taken = tuple[str, int, bool]


class Arguments(ABC):
    """Reads the arguments of one call."""

    @abstractmethod
    def take(self, text: str) -> Taken: ...

    def finish(self, text: str) -> str:
        """The JSON that is left at the end of an answer that ended within the arguments, not cut off."""
        return ""


class JsonArguments(Arguments):
    """A JSON object, passed on as it is written; none at all before the end of the object that it would be in."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def take(self, text: str) -> Taken:
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return (text[: at + 1] if self._depth == 0 else "{}"), at + 1, True
        return text, len(text), False


class LooseArguments(Arguments):
    """An object with bare keys, whose texts have `quote` before and after them: `{city:<|"|>Rome<|"|>,days:3}`."""

    def __init__(self, quote: str) -> None:
        self._quote, self._depth, self._quoted = quote, 0, False

    def take(self, text: str) -> Taken:
        written: list[str] = []
        at = 0
        while at < len(text):
            end = NO if text[at].isspace() else match(self._quote, text, at)  # white space before it is of the text
            if end == MAYBE:
                break
            if end != NO:
                written.append('"')
                self._quoted, at = not self._quoted, end
            elif self._quoted:
                written.append(json.dumps(text[at], ensure_ascii=False)[1:-1])
                at += 1
            elif text[at] in _WORD:
                word = _word(text, at)
                if at + len(word) >= len(text):
                    break
                at += len(word)
                written.append(f'"{word}"' if text[at] == ":" else _PYTHON.get(word, word))
            else:
                self._depth += (text[at] in "{[") - (text[at] in "}]")
                written.append(text[at])
                at += 1
                if self._depth <= 0:
                    return "".join(written), at, True
        return "".join(written), at, False


class PythonArguments(Arguments):
    """The arguments of a call in Python: `(city='Rome', days=3)`."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets that close what is open
        self._quote = ""

    def take(self, text: str) -> Taken:
        written: list[str] = []
        at = 0
        while at < len(text):
            step = self._in_text(text, at) if self._quote else self._between(text, at)
            if step is None:
                break
            piece, at = step
            written.append(piece)
            if not self._open:
                return "".join(written), at, True
        return "".join(written), at, False

    def _in_text(self, text: str, at: int) -> tuple[str, int] | None:
        if text[at] == self._quote:
            following = _beyond_spaces(text, at + 1)
            if not following:
                return None
            if following in _BEHIND_TEXT:  # else it is within the text: templates do not escape it
                self._quote = ""
                return '"', at + 1
        if text[at] != "\\":
            return json.dumps(text[at], ensure_ascii=False)[1:-1], at + 1
        if at + 1 >= len(text):
            return None
        following = text[at + 1]
        digits = text[at + 2 : at + 2 + _ESCAPES.get(following, 0)]
        if following in _ESCAPES and all(digit in hexdigits for digit in digits):
            complete = len(digits) == _ESCAPES[following]
            return (f"\\u{digits:0>4}", at + 2 + len(digits)) if complete else None
        if following == "'":
            return following, at + 2
        return (f"\\{following}", at + 2) if following in _QUOTED else ("\\\\", at + 1)  # as Python keeps it

    def _between(self, text: str, at: int) -> tuple[str, int] | None:
        letter = text[at]
        if letter in "'\"":
            self._quote = letter
            return '"', at + 1
        if letter in "([{":
            self._open.append({"(": "]", "[": "]", "{": "}"}[letter] if self._open else "}")
            return ("[" if self._open[-1] == "]" else "{"), at + 1
        if letter in ")]}":
            return self._open.pop() if self._open else "", at + 1
        if letter not in _WORD:
            return letter, at + 1
        word = _word(text, at)
        end = at + len(word)
        if end >= len(text):
            return None
        if len(self._open) == 1:
            following = _beyond_spaces(text, end)
            if not following:
                return None
            if following == "=":
                return f'"{word}": ', text.index("=", end) + 1
        return _PYTHON.get(word, word), end


@dataclass(frozen=True, slots=True)
class Tags:
    """How arguments are written one by one: `before` KEY `between` VALUE `after`.

    between: one part; or two, between which the template writes `text_hint` where the value is text.
    after: one part; or two, with the key between them.
    newlines: a value has a line break before and after it, which does not belong to it.
    """

    before: Pattern
    between: Pattern
    after: Pattern
    text_hint: str = ""
    newlines: bool = True


class TaggedArguments(Arguments):
    """Arguments one by one, their values typed by the function's schema."""

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        found = schema.get("properties")
        self._tags, self._schema = tags, found if isinstance(found, Mapping) else {}
        self._key: str | None = None
        self._count = 0
        self._text = False  # the value is text, and is passed on as it comes
        self._text_or_null = False
        self._begun = False
        self._searched = 0  # characters of the value in which its end is not

    def take(self, text: str) -> Taken:
        written, at = [] if self._count else ["{"], 0
        self._count = self._count or 1
        while True:
            if self._key is None:
                opened = self._open(text, at)
                if opened is None:
                    return "".join(written), at, False
                if opened == NO:
                    return "".join([*written, "}"]), at, True
                at = opened
                written.append((", " if self._count > 1 else "") + json.dumps(self._key, ensure_ascii=False) + ": ")
                written.append('"' if self._text else "")
                self._count += 1
            after = self._tags.after
            closing = (self._key or "").join(after) if len(after) > 1 else after[0]
            place, end, _ = find([(closing,)], text, at + self._searched)
            if end < 0:
                piece, start = self._partial(text, at, place)
                self._searched = max(0, place - start)
                return "".join([*written, piece]), start, False
            written.append(self._value(text[at:place]))
            at, self._key, self._begun, self._searched = end, None, False, 0

    def finish(self, text: str) -> str:
        begun = "" if self._count else "{"
        return f"{begun}}}" if self._key is None else self._value(text) + "}"

    def _open(self, text: str, at: int) -> int | None:
        """Where the next value begins, NO if none comes, None if that is not known yet."""
        start = match_pattern(self._tags.before, text, at)[0]
        if start < 0:
            return NO if start == NO else None
        end = start
        stop = self._tags.between[0][:1]
        while end < len(text) and text[end] != stop and end - start < _LONGEST:
            end += 1
        found, holes = match_pattern(self._tags.between, text, end)
        if found == MAYBE or end >= len(text):
            return None
        key = text[start:end].strip()
        if found == NO or not key or key.startswith("/"):
            return NO
        self._key = key
        kinds = _kinds(self._schema.get(key))
        self._text = holes[0] == self._tags.text_hint if holes else kinds == {"string"}
        self._text_or_null = kinds == {"string", "null"}
        return found

    def _partial(self, text: str, at: int, place: int) -> tuple[str, int]:
        """Pass on what is certain of a text that goes on."""
        if not self._text:
            return "", at
        if not self._begun and text[at:place]:
            at += self._tags.newlines and text.startswith("\n", at)
            self._begun = True
        if self._tags.newlines and place > at and text[place - 1] == "\n":  # it may be the one before the end
            place -= 1
        return json.dumps(text[at:place], ensure_ascii=False)[1:-1], max(at, place)

    def _value(self, text: str) -> str:
        """The rest of a value."""
        if self._tags.newlines:
            text = (text if self._begun else text.removeprefix("\n")).removesuffix("\n")
        if self._text:
            return json.dumps(text, ensure_ascii=False)[1:]
        plain = text.strip()
        if self._text_or_null and plain not in ("null", "None"):
            return json.dumps(text, ensure_ascii=False)
        try:
            json.loads(plain, parse_constant=_refuse)
            return plain
        except (ValueError, RecursionError):
            return _from_python(plain) or json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows: "string" where it says nothing, "any" where it says it in another way."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type")
    found = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    if found:
        return found
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else []:
            found |= _kinds(option)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    found |= {"string" if isinstance(value, str) else "any" for value in (values if isinstance(values, list) else [])}
    if "$ref" in schema or "allOf" in schema:
        found.add("any")
    return found or {"string"}


def _from_python(text: str) -> str | None:
    """The JSON of a literal in Python, as templates that print values write them; None if it is none."""
    if len(text) > _LITERAL:
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _beyond_spaces(text: str, at: int) -> str:
    """The first character from a place on that is no white space; empty if there is none yet."""
    found = _SPACES.match(text, at)
    end = at if found is None else found.end()
    return text[end : end + 1]


def _word(text: str, at: int) -> str:
    end = at
    while end < len(text) and text[end] in _WORD and end - at < _LONGEST:
        end += 1
    return text[at:end]
