"""Reads an answer as it comes: which of its text is reasoning, content, and calls of functions.

What was begun as a call and turns out to be none (an unknown name, other text) is content, so nothing is lost. A call
is known by its name from the moment its arguments begin, which follow as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hasten.text.answer_format import AnswerFormat, CallFormat, ReasoningFormat
from hasten.text.arguments import Arguments
from hasten.text.markers import MAYBE, NO, Pattern, find, match, match_pattern, pattern_of, squash

_IN_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_BEFORE_OBJECT = 200  # most characters between a name and its arguments
_LONGEST_HEAD = _LONGEST_NAME = 256


@dataclass(slots=True)
class CallPiece:
    """A piece of a call: the name with the first one, and what its arguments, JSON text, go on with."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class AnswerPiece:
    """What a piece of an answer adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, later: AnswerPiece) -> None:
        """Append what comes after it."""
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls += later.calls


class TextCalls(Protocol):
    """Takes calls out of the text of an answer; `AnswerReader` uses one."""

    def push(self, text: str) -> AnswerPiece:
        """Add a piece of the text; returns what is certain."""

    def finish(self, *, cut: bool = False) -> AnswerPiece:
        """Return what is left. cut: the answer was cut off by its length."""


class ReasoningReader:
    """Takes the reasoning at the beginning of an answer out of it.

    prompt: the text that the answer continues, in which the template may have begun the reasoning, or ended it.
    stops: markers that end a reasoning which was not closed; they stay in the text.
    """

    def __init__(self, form: ReasoningFormat, *, prompt: str, stops: tuple[Pattern, ...] = ()) -> None:
        self._closing, self._stops = pattern_of(form.closing), stops
        self._opening = form.opening
        self.inside = self.opened = ends_in_reasoning(form, prompt)
        self.done = False
        self._held, self._begun = "", False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add a piece of the answer; returns what of it is reasoning, and what is the text behind it."""
        if self.done:
            return "", text
        self._held += text
        if not self.inside:
            end = match_pattern(self._closing, self._held)[0]  # of a reasoning that the prompt began in its own way
            if end < 0 or last:
                begun = match(self._opening, self._held)
                if MAYBE in (begun, end) and not last:
                    return "", ""
                end = begun
            else:
                self.opened = self.done = True
                return "", self._held[end:]
            if end < 0:
                self.done = True
                return "", self._held
            self.inside = self.opened = True
            self._held = self._held[end:]
        place, end, which = find((self._closing, *self._stops), self._held)
        complete = end >= 0
        thought = self._held[: len(self._held) if last and not complete else place]
        kept = "" if complete or last else thought[len(thought.rstrip()) :]
        rest = self._held[place if which else end :] if complete else self._held[len(thought) :]
        thought = thought[: len(thought) - len(kept)]
        self._held = "" if complete else kept + rest
        if complete or last:
            thought = thought.rstrip()
        if not self._begun:
            thought = thought.lstrip()
            self._begun = bool(thought)
        if complete:
            self.done, self.inside = True, False
            return thought, rest
        return thought, ""


class TemplateCallReader:
    """Takes calls out of the text of an answer. schemas: the parameters of each function that may be called."""

    def __init__(self, form: CallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._form, self._schemas = form, schemas
        self._begins = begins_of(form)
        self._held = ""
        self._state = "text"  # then "name", "arguments", "closing", "between"
        self._arguments: Arguments | None = None
        self._count = 0
        self._started = 0  # characters of `_held` that are text again if no call follows

    def push(self, text: str, *, last: bool = False) -> AnswerPiece:
        """Add a piece of the text; returns what is certain. last: nothing follows."""
        self._held += text
        found = AnswerPiece()
        while self._step(found, last=last):
            pass
        return found

    def finish(self, *, cut: bool = False) -> AnswerPiece:
        """Return what is left. cut: the answer was cut off by its length, so that arguments stay as they are."""
        found = self.push("", last=True)
        if self._state == "arguments" and self._arguments is not None and not cut:
            found.calls.append(CallPiece(self._count - 1, None, self._arguments.finish(self._held)))
        elif self._state == "text" or (self._state != "arguments" and self._held.strip()):
            found.content += self._held
        self._held = ""
        return found

    def _step(self, found: AnswerPiece, *, last: bool) -> bool:
        """Consume some of the held text; returns whether more may follow."""
        if not self._held:
            return False
        if self._state == "text":
            return self._find(found)
        if self._state == "name":
            return self._open(found, last=last)
        if self._state == "arguments":
            return self._go_on(found)
        return self._close(last=last) if self._state == "closing" else self._between(last=last)

    def _find(self, found: AnswerPiece) -> bool:
        place, end, which = find(self._begins, self._held)
        found.content += self._held[:place]
        self._held = self._held[place:]
        if end < 0:
            return False
        self._state = "name"
        self._started = end - place if self._begins[which] != self._form.opening else 0
        return True

    def _open(self, found: AnswerPiece, *, last: bool) -> bool:
        """Read an opening, a name and the beginning of the arguments, or give up."""
        opened = self._opened(last=last)
        if opened == MAYBE and not last:
            return False
        if isinstance(opened, int):
            found.content += self._held[:1]
            self._held, self._state = self._held[1:], "text"
            return bool(self._held)
        name, start = opened
        self._arguments = self._form.arguments(self._schemas[name])
        found.calls.append(CallPiece(self._count, name, ""))
        self._count += 1
        self._held, self._state, self._started = self._held[start:], "arguments", 0
        return True

    def _opened(self, *, last: bool) -> tuple[str, int] | int:
        text, form = self._held, self._form
        at = match_pattern(form.opening, text, self._started)[0] if form.opening[0] else self._started
        if at < 0:
            return at
        while at < len(text) and text[at].isspace():
            at += 1
        end = at
        while end < len(text) and text[end] in _IN_NAME and end - at <= _LONGEST_NAME:
            end += 1
        if end >= len(text) and not last:
            return MAYBE
        name = text[at:end]
        if name not in self._schemas:
            return NO
        return self._behind_name(name, end)

    def _behind_name(self, name: str, end: int) -> tuple[str, int] | int:
        text, form = self._held, self._form
        if form.form == "tags":
            behind = match_pattern(form.after_name, text, end)[0] if form.after_name[0] else end
            return behind if behind < 0 else (name, behind)
        if form.form != "json":
            behind = match("(" if form.form == "python" else "{", text, end)
            return behind if behind < 0 else (name, behind - 1)
        places = [text.find(sign, end, end + _BEFORE_OBJECT) for sign in "{}"]  # "}": a call without arguments
        place = min((place for place in places if place >= 0), default=NO)
        if place < 0:
            return MAYBE if len(text) < end + _BEFORE_OBJECT else NO
        return name, place

    def _go_on(self, found: AnswerPiece) -> bool:
        assert self._arguments is not None
        written, consumed, done = self._arguments.take(self._held)
        self._held = self._held[consumed:]
        if written:
            found.calls.append(CallPiece(self._count - 1, None, written))
        if done:
            self._state, self._arguments = "closing" if self._form.until[0] else "between", None
        return done

    def _close(self, *, last: bool) -> bool:
        """Skip the rest of a call whose end is known."""
        place, end, _ = find((self._form.until,), self._held)
        if end < 0 and not last and len(self._held) < _BEFORE_OBJECT:
            return False
        if last and end < 0:
            self._held = ""
        elif end >= 0 and place <= _BEFORE_OBJECT:
            self._held = self._held[end:]
        self._state = "between"
        return True

    def _between(self, *, last: bool) -> bool:
        """Skip what closes a call, up to the next one or to text."""
        stripped = self._held.lstrip().lstrip(",;").lstrip()
        if not stripped:
            return False
        opening = match_pattern(self._form.opening, stripped)[0] if self._form.opening[0] else NO
        listed = not self._form.opening[0] and stripped[0] in _IN_NAME and self._held.lstrip()[0] == ","
        if opening >= 0 or listed:
            self._held, self._state = stripped, "name"
            return True
        ends = [match_pattern(closer, stripped)[0] for closer in self._form.closers]
        if MAYBE in (opening, *ends) and not last:
            return False
        if MAYBE in ends:  # the answer ended within what closes a call
            self._held = ""
            return False
        end = max(ends, default=NO)
        self._held, self._state = (stripped[end:], "between") if end > 0 else (self._held, "text")
        return True


class AnswerReader:
    """Reads one answer in the format of its template.

    prompt: the text that the answer continues. calls: the reader of its calls, where functions may be called.
    structured: the answer is held to a structure, which comes after the closing of its reasoning only.
    stops: what ends a reasoning that was not closed, the beginnings of calls.
    """

    def __init__(
        self, form: AnswerFormat, *, prompt: str, calls: TextCalls | None = None, structured: bool = False
    ) -> None:
        begins = () if calls is None or form.calls is None or structured else begins_of(form.calls)
        self.stops = tuple(begin for begin in begins if begin[0][:1] in ("<", "["))
        self._reasoning = None
        if form.reasoning is not None:
            self._reasoning = ReasoningReader(form.reasoning, prompt=prompt, stops=self.stops)
        self._form, self._calls = form, calls
        # Text whose beginning may be the format's head; None behind it.
        self._lead: str | None = "" if form.head or form.reasoning is not None else None
        self._thought = False
        self._tail = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, text: str) -> AnswerPiece:
        """Add a piece of the answer; returns what is certain of it."""
        return self._push(text, last=False)

    def finish(self, *, cut: bool = False) -> AnswerPiece:
        """Return what is left. cut: the answer was cut off by its length."""
        found = self._push("", last=True)
        if self._calls is not None:
            rest = self._calls.finish(cut=cut)
            found.content += self._without_tail(rest.content) if self._form.tail else rest.content
            found.calls += rest.calls
        found.content, self._tail = found.content + self._tail, ""
        return found

    def _push(self, text: str, *, last: bool) -> AnswerPiece:
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, last=last)
            self._thought = self._reasoning.opened
        if self._lead is not None:
            text = self._without_head(text, last=last)
        found = AnswerPiece(content=text) if self._calls is None else self._calls.push(text)
        found.reasoning = thought
        if self._form.tail:
            found.content = self._without_tail(found.content)
        return found

    def _without_head(self, text: str, *, last: bool) -> str:
        """The text without what a template writes before it."""
        self._lead = (self._lead or "") + text
        head, stripped = self._form.head, self._lead.lstrip()
        rest: str | None = stripped if self._thought else self._lead
        if not stripped:
            rest = None
        elif head and stripped[0] == head[0]:
            begins = () if self._form.calls is None else begins_of(self._form.calls)
            ending = (head[head.rfind("<") :],)
            place, end, which = find((ending, *begins), stripped)
            if end < 0:
                rest = None if len(stripped) < _LONGEST_HEAD else rest
            else:
                rest = stripped[place:] if which else stripped[end:]
        if rest is None and not last:
            return ""
        lead, self._lead = self._lead, None
        return ("" if self._thought else lead) if rest is None else rest

    def _without_tail(self, content: str) -> str:
        self._tail += content
        kept, start, end = [], 0, 0
        while end >= 0:
            place, end, _ = find((pattern_of(self._form.tail),), self._tail, start)
            kept.append(self._tail[start:place])
            start = end if end >= 0 else place
        self._tail = self._tail[start:]
        return "".join(kept)


def ends_in_reasoning(form: ReasoningFormat, prompt: str) -> bool:
    """Whether the prompt begins the reasoning of its answer."""
    return squash(prompt[-4096:]).endswith(form.opening)


def begins_of(form: CallFormat) -> tuple[Pattern, ...]:
    """What begins calls in a text: the section, or an opening that is a marker by itself."""
    section = pattern_of(form.section)
    if not form.section:
        return (form.opening,)
    return (section, form.opening) if form.opening[0][:1] == "<" else (section,)
