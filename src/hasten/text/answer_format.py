"""How a chat template writes answers: reasoning and tool calls, found by rendering probes and comparing the texts.

A conversation is rendered without an answer, with one of text, of reasoning, of one call and of two calls, all made of
words that nothing else contains. What surrounds these words, and is the same in two of the texts, are the markers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hasten.errors import HastenError
from hasten.text.arguments import Arguments, JsonArguments, LooseArguments, PythonArguments, TaggedArguments, Tags
from hasten.text.chat import ChatTemplate
from hasten.text.markers import HOLE, Pattern, common_prefix, match, pattern_of, squash

_QUESTION, _TEXT, _THOUGHT = "zqquestion", "Zqcontent", "Zqreasoning"
_NAMES, _IDS, _KEYS = ("zqfirst", "zqsecond"), ("abc123def", "uvw789xyz"), ("zqk", "zqm")
_VALUES = (("Zqseven", 73519), ("Zqeight", 91537))
_LOOK_BACK = 500  # characters of a rendered conversation, which may end with a reasoning that is begun
_ATTRIBUTE = re.compile(r"(?<=\s)[\w.]{1,32}=$")
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d(?![A-Za-z0-9])")
_TOKEN = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|[^\w\s]")
_NAMED_TAG = re.compile(r"<[^<>]*>\w+")
_LONGEST_CLOSER = 200
_SHORTEST_MARKER = 3  # characters of a marker around text
# Markers in templates that take reasoning out of earlier answers, or leave it to the text that is given.
_KNOWN_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))

Form = Literal["json", "tags", "loose", "python"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning, without white space; closing_text: the second as the template writes it."""

    opening: str
    closing: str
    closing_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: `section` `opening` NAME `after_name` arguments …, and again from `opening`.

    section: written once before all calls, perhaps empty. closers: what may follow arguments.
    quote: around the texts of loose arguments. tags: around each of arguments that are written one by one.
    until: the end of a call, where it is known; what is before it belongs to the call.
    """

    form: Form
    section: str
    opening: Pattern
    closers: tuple[Pattern, ...]
    after_name: Pattern = ("",)
    quote: str = ""
    tags: Tags | None = None
    until: Pattern = ("",)

    def arguments(self, schema: Mapping[str, Any]) -> Arguments:
        """A reader for the arguments of one call of a function with this schema."""
        if self.form == "tags" and self.tags is not None:
            return TaggedArguments(self.tags, schema)
        if self.form == "loose":
            return LooseArguments(self.quote)
        return PythonArguments() if self.form == "python" else JsonArguments()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What was found of a template; None where it writes no reasoning, or no calls.

    head: the end of what a template writes before an answer's text, beyond the generation prompt (head_text: as it is
    written). tail: what it writes after it. special: marks of reasoning or of text have special tokens, which the text
    of an answer must then keep.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    head: str = ""
    head_text: str = ""
    tail: str = ""
    special: bool = False

    def markers(self, *, calls: bool) -> list[str]:
        """Markers that the text of an answer must keep for it to be read; calls: those of calls too.

        The tail is none of them: its special tokens may be left out, as those of any answer.
        """
        found = [self.head]
        if self.reasoning is not None:
            found += [self.reasoning.opening, self.reasoning.closing]
        if calls and self.calls is not None:
            form, tags = self.calls, self.calls.tags
            found += [form.section, *form.opening, *form.after_name, form.quote]
            found += [] if tags is None else [*tags.before, *tags.between, *tags.after]
        return [marker for marker in found if marker]


def find_answer_format(template: ChatTemplate, *, special_tokens: Mapping[str, str]) -> AnswerFormat:
    """The format of a template's answers. Takes some ten renderings; never raises for a template that fails."""
    probe = _Probe(template, special_tokens)
    text = probe.turn(content=_TEXT)
    if text is None or _TEXT not in text:
        return AnswerFormat(reasoning=_known_reasoning(template.source))
    before, after = text.split(_TEXT, 1)
    both = probe.turn(content=_TEXT, calls=1)
    tail = ""
    if both is not None and _TEXT in both and _NAMES[0] in both:
        tail = squash(_whole_tags(common_prefix(after, both.split(_TEXT, 1)[1].split(_NAMES[0])[0])))
    eos = special_tokens.get("eos_token")
    if not tail and eos and eos in after:
        tail = squash(after.split(eos)[0])
    if not tail.startswith("<") or len(tail) < _SHORTEST_MARKER:  # a sign that text has too
        tail = ""
    reasoning = _reasoning(probe) or _known_reasoning(template.source)
    head_text = before[len(_whole_tags(common_prefix(before, probe.prompt))) :]
    head = probe.beyond(before)
    for marker in () if reasoning is None else (reasoning.opening, reasoning.closing):
        head = head.rpartition(marker)[2]
    if "<" not in head:
        head = ""
    head_text = head_text if squash(head_text) == head else head
    calls = _calls(probe, before, after, tail)
    return AnswerFormat(reasoning=reasoning, calls=calls, head=head, head_text=head_text, tail=tail)


class _Probe:
    """Renders answers to one question.

    prompt: what the template writes to begin an answer. ending: the end of the whole text with it.
    """

    def __init__(self, template: ChatTemplate, special_tokens: Mapping[str, str]) -> None:
        self._template, self._special = template, special_tokens
        self._asked = [{"role": "user", "content": _QUESTION}]
        self._base = self._render(self._asked, prompted=False) or ""
        prompted = self._render(self._asked, prompted=True) or ""
        self.ending = squash(prompted[-_LOOK_BACK:])
        self.prompt = prompted[len(_whole_tags(common_prefix(self._base, prompted))) :]

    def turn(self, *, content: Any = "", calls: int = 0, reasoning: str | None = None) -> str | None:
        """The text of an answer, from the role on; None if the template refuses it."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = [self._call(number) for number in range(calls)]
        text = self._render([*self._asked, message], prompted=False)
        return None if text is None else text[len(_whole_tags(common_prefix(self._base, text))) :]

    def beyond(self, text: str) -> str:
        """What a text from the role on has beyond the generation prompt, without white space."""
        plain = squash(text[len(_whole_tags(common_prefix(text, self.prompt))) :])
        ends = (k for k in range(len(plain), 0, -1) if plain[k - 1] == ">" and self.ending.endswith(plain[:k]))
        return plain[next(ends, 0) :]

    def _call(self, number: int) -> dict[str, Any]:
        arguments = dict(zip(_KEYS, _VALUES[number], strict=True))
        return {"id": _IDS[number], "type": "function", "function": {"name": _NAMES[number], "arguments": arguments}}

    def _render(self, messages: list[dict[str, Any]], *, prompted: bool) -> str | None:
        kinds = zip(_KEYS, ("string", "integer"), strict=True)
        properties = {key: {"type": kind, "description": "x"} for key, kind in kinds}
        schema = {"type": "object", "properties": properties, "required": [_KEYS[0]]}
        functions = [{"name": name, "description": "x", "parameters": schema} for name in _NAMES]
        try:
            return self._template.render(
                messages,
                special_tokens=self._special,
                add_generation_prompt=prompted,
                tools=[{"type": "function", "function": function} for function in functions],
            )
        except HastenError:
            return None


def _reasoning(probe: _Probe) -> ReasoningFormat | None:
    """The markers around reasoning that a template writes."""
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _TEXT}]
    spoken = called = None
    for content in (_TEXT, parts):
        spoken = probe.turn(content=content, reasoning=_THOUGHT if content is _TEXT else None)
        if spoken is None or _THOUGHT not in spoken or "thinking'" in spoken or 'thinking"' in spoken:
            continue  # among them templates that print the parts as they are
        if _TEXT in spoken.split(_THOUGHT, 1)[1]:
            break
    else:
        spoken = None
    called = probe.turn(calls=1, reasoning=_THOUGHT)
    if called is None or _THOUGHT not in called or _NAMES[0] not in called.split(_THOUGHT, 1)[1]:
        called = None
    betweens = []
    if spoken is not None:
        betweens.append(spoken.split(_THOUGHT, 1)[1].split(_TEXT, 1)[0])
    if called is not None:
        betweens.append(called.split(_THOUGHT, 1)[1].split(_NAMES[0], 1)[0])
    if not betweens:
        return None
    closing_text = _whole_tags(common_prefix(*betweens)) if len(betweens) > 1 else _first_tag(betweens[0])
    closing = squash(closing_text)
    found = spoken if spoken is not None else called
    assert found is not None
    before = found.split(_THOUGHT, 1)[0]
    opening = probe.beyond(before)
    if not opening:  # the prompt has it
        opening = _last_tag(probe.ending.removesuffix(closing))
    if min(len(opening), len(closing)) < _SHORTEST_MARKER:  # signs, such as brackets, are in texts too
        return None
    return ReasoningFormat(opening, closing, closing_text)


def _known_reasoning(source: str) -> ReasoningFormat | None:
    for opening, closing in _KNOWN_REASONING:
        if closing in source:
            return ReasoningFormat(opening, closing, f"\n{closing}\n\n")
    return None


def _calls(probe: _Probe, before_text: str, after_text: str, tail: str) -> CallFormat | None:
    """The format of calls, from an answer of two, or of one where the template refuses two."""
    count = 2
    text = probe.turn(calls=2)
    if text is None or not all(word in text for word in (*_NAMES, _VALUES[1][0])):
        count, text = 1, probe.turn(calls=1)
    if text is None or _NAMES[0] not in text or any(key not in text for key in _KEYS):
        return None
    text = text[len(_whole_tags(common_prefix(text, before_text))) :]
    for name in _IDS:
        text = text.replace(name, HOLE)
    cut = _cut(text, count)
    if cut is None:
        return None
    before, inside, between, end = cut
    before = _without(before, tail)
    section, opening = "", before
    if count == 2:
        start = _tag_start(before, len(before) - len(_common_suffix(before, between)))
        section, opening = before[:start].split(HOLE)[0], before[start:]
        between = between.removesuffix(opening)
    form = _form(inside, between if count == 2 else end)
    if form is None or not squash(section + opening).strip(HOLE):
        return None
    if form["form"] != "tags":  # the sign that ends the arguments
        between, end = between.lstrip()[1:], end.lstrip()[1:]
    closers = _closers(between) | _closers(_without_end(end, after_text))
    ordered = tuple(pattern_of(closer) for closer in sorted(closers, key=len, reverse=True))
    return CallFormat(section=squash(section), opening=pattern_of(opening), closers=ordered, **form)


def _cut(text: str, count: int) -> tuple[str, list[str], str, str] | None:
    """The text before the first name; what surrounds its keys and values; up to the second name; and behind all."""
    before, _, rest = text.partition(_KEYS[0])
    if _NAMES[0] not in before:
        return None
    before, first_gap = before.rsplit(_NAMES[0], 1)
    inside = [_NUMBER.sub(HOLE, first_gap)]
    for word in (str(_VALUES[0][0]), _KEYS[1], str(_VALUES[0][1])):
        gap, found, rest = rest.partition(word)
        if not found:
            return None
        inside.append(gap)
    between = ""
    if count == 2:
        between, found, rest = rest.partition(_KEYS[0])
        between = between.rpartition(_NAMES[1])[0]
        rest = rest.rpartition(str(_VALUES[1][1]))[2]
    before, between = before.replace(_NAMES[0], HOLE), between.replace(_NAMES[1], HOLE)
    before, between, rest = (_NUMBER.sub(HOLE, part).replace(_KEYS[1], HOLE) for part in (before, between, rest))
    return before, inside, between, rest


def _form(inside: list[str], after: str) -> dict[str, Any] | None:
    """The form of arguments and what belongs to it. after: what follows the last value."""
    first_gap, first_middle, gap, second_middle = inside
    opened = squash(first_gap)
    if opened.endswith('{"'):
        return {"form": "json"}
    if opened.endswith("{") and first_middle.startswith(":"):
        return {"form": "loose", "quote": squash(first_middle[1:])} if squash(first_middle[1:]) else None
    if opened.endswith("(") and first_middle.startswith("="):
        return {"form": "python"}
    gap = gap.replace(_KEYS[0], HOLE)
    closing = _whole_tags(common_prefix(gap, after))
    key_opening = gap[len(closing) :]
    between, hint = _with_hole(first_middle, second_middle)
    newlines = first_middle.endswith("\n") and gap.startswith("\n")
    tags = Tags(pattern_of(key_opening), pattern_of(between), pattern_of(closing), text_hint=hint, newlines=newlines)
    if not all(part[0] for part in (tags.before, tags.between, tags.after)):
        return None
    squashed = squash(first_gap).removesuffix(squash(key_opening))
    return {"form": "tags", "tags": tags, "after_name": pattern_of(squashed)}


def _with_hole(first: str, second: str) -> tuple[str, str]:
    """What two texts have in common, with a hole where they differ; and what the first has there."""
    if squash(first) == squash(second):
        return first, ""
    start = common_prefix(first, second).rstrip("abcdefghijklmnopqrstuvwxyz")
    end = _common_suffix(first[len(start) :], second[len(start) :]).lstrip("abcdefghijklmnopqrstuvwxyz")
    return start + HOLE + end, first[len(start) : len(first) - len(end)]


def _closers(text: str) -> set[str]:
    """What may follow a call: this text, and each of its tags and signs."""
    text = squash(text).lstrip(",;")
    found = {text, *_TOKEN.findall(text), *_NAMED_TAG.findall(text)}
    return {token for token in found if 0 < len(token) <= _LONGEST_CLOSER and not token.startswith(HOLE)}


def _common_suffix(first: str, second: str) -> str:
    return common_prefix(first[::-1], second[::-1])[::-1]


def _without(text: str, prefix: str) -> str:
    """The text without a prefix in which there is no white space."""
    end = match(prefix, text) if prefix else 0
    return text[end:] if end > 0 else text


def _without_end(text: str, suffix: str) -> str:
    """The text without the end of the turn."""
    plain, end = squash(text), squash(suffix)
    return plain.removesuffix(end) if end else plain


def _whole_tags(text: str) -> str:
    """The text without a tag, or the attribute of one, that is not complete at its end."""
    start = text.rfind("<")
    text = text[:start] if start > text.rfind(">") else text
    return _ATTRIBUTE.sub("", text)


def _tag_start(text: str, place: int) -> int:
    """The place, or the end of the tag that it is in."""
    if text.rfind("<", 0, place) <= text.rfind(">", 0, place):
        return place
    return text.find(">", place) + 1 or place


def _first_tag(text: str) -> str:
    found = _TOKEN.match(squash(text))
    return found.group() if found else ""


def _last_tag(text: str) -> str:
    """The last tag of a text and what follows it: `<|channel>thought`."""
    start = max(text.rfind("<"), text.rfind("["))
    return text[start:] if start >= 0 else ""
