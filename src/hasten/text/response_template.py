"""`response_template` of tokenizer_config.json, a declaration of how answers are written, as an AnswerFormat.

The layout is that of transformers' `parse_response`. Its patterns are a stranger's regular expressions, so they are
translated, never run: text, white space and the groups name, key and value become markers and the gaps between them.
A field whose pattern has anything else is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.text.answer_format import AnswerFormat, CallFormat, Form, ReasoningFormat
from hasten.text.arguments import Tags
from hasten.text.markers import pattern_of, squash

_LONGEST_PATTERN = 1000
_GROUP = re.compile(r"\(\?P<(name|key|value)>")
_SPACE = re.compile(r"(?:\\[sn]|[ \n])[*+?]{0,2}")
_SPECIAL = frozenset(".^$*+?{}[]|()\\")
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")


def read_response_template(given: Any) -> AnswerFormat:
    """The format that a response template declares, as far as it is translated. Never raises for one that is wrong."""
    fields = given.get("fields") if isinstance(given, Mapping) else None
    if not isinstance(fields, Mapping):
        return AnswerFormat()
    named = (fields.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    thought = next((field for field in named if isinstance(field, Mapping)), {})
    calls = fields.get("tool_calls")
    return AnswerFormat(reasoning=_reasoning(thought), calls=_calls(calls if isinstance(calls, Mapping) else {}))


def _reasoning(field: Mapping[str, Any]) -> ReasoningFormat | None:
    opening, closing = _edge(field, "open"), _edge(field, "close")
    if opening is None or closing is None or len(opening) != 1 or len(closing) != 1:
        return None
    return ReasoningFormat(opening[0], closing[0], closing[0])


def _calls(field: Mapping[str, Any]) -> CallFormat | None:
    opening, closing = _edge(field, "open"), _edge(field, "close")
    given = field.get("content_args")
    args: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if opening is None or closing is None or len(opening) not in (1, 3) or len(closing) != 1:
        return None
    form: Form = "json"
    tags, quote, after_name = None, "", ""
    before = opening[0]
    if field.get("content") == "xml-inline" and len(opening) == 3:
        form, after_name = "tags", opening[2]
        parts = _translate(args.get("tag_pattern"))
        if parts is None or parts[1::2] != ["key", "value"] or not all(parts[::2]):
            return None
        tags = Tags(pattern_of(parts[0]), pattern_of(parts[2]), pattern_of(parts[4]))
    elif field.get("content") != "json":
        return None
    elif len(opening) == 1:  # the content is the whole call
        before += '{"name":"'
    elif args.get("unquoted_keys") is True:
        form, quote = "loose", _quote(args.get("string_delims"))
        if not quote:
            return None
    until = pattern_of(closing[0])
    return CallFormat(
        form=form,
        section="",
        opening=pattern_of(before),
        closers=(),
        after_name=pattern_of(after_name),
        quote=quote,
        tags=tags,
        until=until,
    )


def _quote(delimiters: Any) -> str:
    """The mark around texts, where it is the same before and after them."""
    pair = delimiters[0] if isinstance(delimiters, Sequence) and len(delimiters) == 1 else ()
    if not isinstance(pair, Sequence) or len(pair) != 2 or pair[0] != pair[1] or not isinstance(pair[0], str):
        return ""
    return squash(pair[0])


def _edge(field: Mapping[str, Any], name: str) -> list[str] | None:
    """The marker at one edge of a field: a text, or a translated pattern."""
    if isinstance(field.get(name), str):
        return [squash(field[name])] if squash(field[name]) else None
    parts = _translate(field.get(f"{name}_pattern"))
    return parts if parts and parts[0] and parts[1::2] in ([], ["name"]) else None


def _translate(pattern: Any) -> list[str] | None:
    """A regular expression as literals and names of groups in turn; None if it is more than that."""
    if not isinstance(pattern, str) or len(pattern) > _LONGEST_PATTERN:
        return None
    parts, at = [""], 0
    while at < len(pattern):
        if found := _GROUP.match(pattern, at):
            end = _group_end(pattern, found.end())
            if end is None:
                return None
            parts += [found[1], ""]
            at = end
        elif found := _SPACE.match(pattern, at):
            at = found.end()
        elif found := _ESCAPED.match(pattern, at):
            parts[-1] += found[1]
            at = found.end()
        elif pattern[at] in _SPECIAL:
            return None
        else:
            parts[-1] += pattern[at]
            at += 1
        if pattern[at : at + 1] in ("*", "+", "?", "{"):
            return None
    return parts


def _group_end(pattern: str, at: int) -> int | None:
    """Where a group ends that has no group in it."""
    in_class = False
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif in_class or letter == "[":
            in_class = letter != "]"
        elif letter == "(":
            return None
        elif letter == ")":
            return at + 1
        at += 1
    return None
