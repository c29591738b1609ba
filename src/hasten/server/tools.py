"""tools and tool_choice: what the template shows, what constrains the answer, and how calls are parsed from it.

The chat template shows how a model writes calls (`text/answer_format.py` finds the format of any template). Three
formats are read here, as whole calls at the end of an answer:
- Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the other. Small models leave the tags
  out: an answer that is one such object, perhaps in a code block, is a call too.
- Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`
- Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`, several divided by `;`
Text that looks like a call but is not (invalid JSON, an unknown name) stays text, so nothing is lost. An answer cut off
by its length inside a call ends with that call and its partial arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from hasten.server.bodies import ChatBody, ToolChoice
from hasten.server.errors import ApiError
from hasten.server.service import Service
from hasten.server.structured import Grammar
from hasten.text.answer_format import AnswerFormat
from hasten.text.answer_reader import AnswerPiece, CallPiece, TemplateCallReader, TextCalls

Format = Literal["hermes", "mistral", "llama"]
MARKERS: dict[Format, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}
AFTER_CALL: dict[Format | None, str] = {"hermes": "</tool_call>", "llama": ";"}
# How a template that writes calls in one of these formats begins them, without white space.
_BEGINS: dict[Format, str] = {"hermes": '<tool_call>{"name":"', "mistral": "[TOOL_CALLS]", "llama": '{"name":"'}
# How an answer begins, without white space, that is one call without its marker; characters until its name is whole.
_BARE, _LONGEST_NAME = ('{"name":"', '```json{"name":"', '```{"name":"'), 1000
_DECODER = json.JSONDecoder()
# The beginning of a call: its complete name, and its arguments so far.
_NAME, _ARGUMENTS = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"', r"(?P<arguments>\{.*)"
_NAMED = re.compile(_NAME)
_BEGUN = re.compile(rf'{_NAME}(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*{_ARGUMENTS})?', re.DOTALL)
_BEGUN_MISTRAL = re.compile(rf"(?P<name>[^\[{{\s]+)(?:\[ARGS\])?\s*{_ARGUMENTS}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call: the function's name, and its arguments as JSON text (partial if the answer was cut off)."""

    name: str
    arguments: str


def find_format(template: str) -> Format | None:
    """The call format of a chat template; None if it has no tools or an unknown format."""
    if "tools" not in template:
        return None
    for name in ("hermes", "mistral"):
        if MARKERS[name] in template:
            return name
    return "llama" if MARKERS["llama"] in template or '"parameters"' in template else None


def format_of(form: AnswerFormat, template: str) -> Format | None:
    """The format in which whole calls are read; None where `form` says how to read them, or nothing does."""
    found = find_format(template)
    if form.calls is not None and found is not None:
        written = form.calls.section + form.calls.opening[0]
        known = form.calls.form == "json" and written.startswith(_BEGINS[found])
        if not known and written[:1] not in ("{", "["):  # bare JSON says less than the marker in the template
            return None
    return found


def arguments_of(text: str) -> Any:
    """The arguments of a call as a value; an empty object if the answer was cut off inside them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


class CallReader:
    """Splits an answer into text and calls. format None: the whole answer is calls in JSON (a forced choice)."""

    def __init__(self, names: Collection[str], *, form: Format | None) -> None:
        self._names, self._form = frozenset(names), form
        self._marker = "" if form is None else MARKERS[form]
        self._held = ""
        self._holding = form is None
        self._begun = False  # some text was shown

    def push(self, text: str) -> str:
        """Add a piece of the answer; returns the part that is certainly text."""
        self._held += text
        if self._holding:
            return ""
        place = self._held.find(self._marker)
        if place < 0 and self._form == "llama" and not self._begun and self._held.lstrip()[:1] in ("{", ""):
            self._holding = bool(self._held.strip())
            return ""
        if place < 0 and self._form == "hermes" and not self._begun and (bare := self._begins_bare()) is not False:
            self._holding = bare is True
            return ""
        if place >= 0:
            self._holding = True
        else:  # the end of the text may be the beginning of the marker
            longest = min(len(self._marker) - 1, len(self._held))
            kept = next((k for k in range(longest, 0, -1) if self._marker.startswith(self._held[-k:])), 0)
            place = len(self._held) - kept
        shown, self._held = self._held[:place], self._held[place:]
        self._begun = self._begun or bool(shown.strip())
        return shown

    def finish(self, *, cut: bool = False) -> tuple[str, list[ParsedCall]]:
        """Finish: returns the rest of the text, and the calls. cut: the answer was cut off by its length."""
        held, self._held = self._held, ""
        if not self._holding:
            return held, []
        calls, text = self._calls(held, cut=cut), ""
        if not calls and self._form == "hermes" and (place := held.find(self._marker)) > 0:
            text, held = held[:place], held[place:]  # a text that looked like a call without a marker
            calls = self._calls(held, cut=cut)
        return text + ("" if calls or (cut and self._form is None) else held), calls

    def _begins_bare(self) -> bool | None:
        """Whether the answer begins as a call without a marker; None: so far it may."""
        begun = "".join(self._held[:_LONGEST_NAME].split())
        if not begun.startswith(_BARE):
            return None if any(one.startswith(begun) for one in _BARE) else False
        named = _NAMED.match(_unfenced(self._held))
        if named is None:
            return None if len(self._held) < _LONGEST_NAME else False
        return named["name"] in self._names

    def _calls(self, text: str, *, cut: bool) -> list[ParsedCall]:
        """The calls that a text is made of; none if it is anything else."""
        bare = self._form == "hermes" and not text.lstrip().startswith(self._marker)
        try:
            calls = [self._bare(text)] if bare else self._read(text)
        except (ValueError, RecursionError):
            calls = []
        if cut and not calls:
            calls = self._bare_cut(text) if bare else self._read_cut(text)
        return calls

    def _bare(self, text: str) -> ParsedCall:
        """Parse a call without a marker. Raises ValueError for anything else, such as a function's description."""
        item = json.loads(_unfenced(text))
        if not isinstance(item, dict) or item.keys() != {"name", "arguments"}:
            raise ValueError("no call and nothing else")
        return self._call(item)

    def _bare_cut(self, text: str) -> list[ParsedCall]:
        """Parse a call without a marker that was cut off inside its arguments, or behind them."""
        begun = _BEGUN.match(_unfenced(text))
        if begun is None or begun["name"] not in self._names or begun["arguments"] is None:
            return []
        try:
            found, end = _DECODER.raw_decode(begun["arguments"])
        except (ValueError, RecursionError):
            return [ParsedCall(begun["name"], begun["arguments"])]
        closing = "".join(begun["arguments"][end:].split())
        return [self._call({"name": begun["name"], "arguments": found})] if "}```".startswith(closing) else []

    def _read(self, text: str) -> list[ParsedCall]:
        """Parse the calls of a complete answer. Raises ValueError if anything else is in it."""
        calls: list[ParsedCall] = []
        rest = text.strip()
        while rest:
            if self._form in ("hermes", "mistral") and not rest.startswith(self._marker):
                raise ValueError("text after a call")
            rest = rest.removeprefix(self._marker).lstrip()
            if self._form == "mistral" and not rest.startswith(("[", "{")):  # name[ARGS]{…}, or name{…}
                head, brace, arguments = rest.partition("{")
                found, end = _DECODER.raw_decode(brace + arguments)
                found, end = {"name": head.split("[")[0].strip(), "arguments": found}, end + len(head)
            else:
                found, end = _DECODER.raw_decode(rest)
            several = isinstance(found, list) and self._form in (None, "mistral")
            calls += [self._call(item) for item in (found if several else [found])]
            rest = rest[end:].lstrip().removeprefix(AFTER_CALL.get(self._form, "")).lstrip()
        return calls

    def _read_cut(self, text: str) -> list[ParsedCall]:
        """Parse the calls of an answer that was cut off; the last call may be incomplete."""
        calls: list[ParsedCall] = []
        words = [word for word in (self._marker, AFTER_CALL.get(self._form, "")) if word]
        between = re.compile("|".join([*map(re.escape, words), r"[\[\],\s]"]))
        rest = text
        while True:
            while skipped := between.match(rest):
                rest = rest[skipped.end() :]
            begun = _BEGUN.match(rest) or (_BEGUN_MISTRAL.match(rest) if self._form == "mistral" else None)
            if begun is None or begun["name"] not in self._names:
                break
            arguments = begun["arguments"] or ""
            try:
                found, end = _DECODER.raw_decode(arguments)
            except (ValueError, RecursionError):
                return [*calls, ParsedCall(begun["name"], arguments)]
            calls.append(self._call({"name": begun["name"], "arguments": found}))
            rest = arguments[end:].lstrip().removeprefix("}")
        if self._form is None and len(self._names) == 1 and (rest or not calls):  # the only possible name
            calls.append(ParsedCall(next(iter(self._names)), ""))
        elif self._form is not None and rest and not any(word.startswith(rest) for word in words):
            return []  # text
        return calls

    def _call(self, item: Any) -> ParsedCall:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in self._names:
            raise ValueError("no call of a function that was offered")
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no object")
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def _unfenced(text: str) -> str:
    """A text without the code block around it."""
    return text.strip().removeprefix("```").removeprefix("json").removesuffix("```").strip()


class _WholeCalls:
    """A CallReader as a reader of an answer's text: its calls come whole, at the end."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader

    def push(self, text: str) -> AnswerPiece:
        return AnswerPiece(content=self._reader.push(text))

    def finish(self, *, cut: bool = False) -> AnswerPiece:
        rest, calls = self._reader.finish(cut=cut)
        return AnswerPiece(rest, calls=[CallPiece(i, call.name, call.arguments) for i, call in enumerate(calls)])


class Tools:
    """The tools of one request.

    "auto" reads calls in the model's own format out of the answer. A forced choice ("required", or a function's name)
    holds every token to the JSON of a call, so that it works with any model: an object with a name that was offered
    and arguments that keep to its schema. "none" does not show the tools to the model.
    """

    def __init__(self, body: ChatBody, service: Service) -> None:
        self._service = service
        tools = body.tools or []
        choice = body.tool_choice or ("auto" if tools else "none")
        if choice != "none" and not tools:
            raise ApiError("tool_choice needs tools", param="tool_choice")
        self._functions = {tool.function.name: tool.function for tool in tools}
        if len(self._functions) < len(tools):
            raise ApiError("tools: two functions have the same name", param="tools")
        self.named = choice.function.name if isinstance(choice, ToolChoice) else None
        if self.named is not None and self.named not in self._functions:
            message = f"tool_choice: {self.named[:80]!r} is none of the tools"
            raise ApiError(message, param="tool_choice")
        self._forced = self.named is not None or choice == "required"
        self.parallel = body.parallel_tool_calls is not False
        self._format: Format | None = None
        self._template: AnswerFormat = AnswerFormat()
        self._offered = choice != "none"
        self.shown: list[dict[str, Any]] | None = None
        if choice == "none":
            return
        if self._forced and body.response_format is not None and body.response_format.type != "text":
            message = "response_format cannot be combined with a forced tool_choice, which decides the form itself"
            raise ApiError(message, param="response_format")
        self.shown = [tool.model_dump(exclude_none=True) for tool in tools]

    def read_as(self, form: AnswerFormat) -> None:
        """Read calls in the format of the template. Raises ApiError where it is not known and none is forced."""
        if not self._offered:
            return
        templates = self._service.tokenizer.templates
        chosen = templates.get("tool_use", templates.get("default"))
        template = "" if chosen is None else chosen.source
        self._template, self._format = form, format_of(form, template)
        if self._format is None and form.calls is None and not self._forced:
            missing = "format of tool calls is not known" if "tools" in template else "chat template shows it no tools"
            message = f'this model\'s {missing}; tool_choice "required" or a name works'
            raise ApiError(message, param="tool_choice")

    async def constraint(self) -> Grammar | None:
        """The constraint of a forced choice; None otherwise."""
        if not self._forced:
            return None
        names = [self.named] if self.named is not None else list(self._functions)
        several = self.named is None and self.parallel
        calls = [self._schema(name) for name in names]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if several:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return await self._service.grammars.constraint(schema, param="tools")

    def reader(self) -> TextCalls | None:
        """The parser for the calls of one answer; None if it cannot have any."""
        if not self._offered:
            return None
        names = self._functions if self.named is None else [self.named]
        if not self._forced and self._format is None and self._template.calls is not None:
            return TemplateCallReader(self._template.calls, {n: self._functions[n].parameters or {} for n in names})
        return _WholeCalls(CallReader(names, form=None if self._forced else self._format))

    def markers(self) -> list[str]:
        """Marks of calls that the text of an answer must have."""
        if self._forced or not self._offered:
            return []
        known = [] if self._format is None else [MARKERS[self._format]]
        return known + self._template.markers(calls=True)

    def _schema(self, name: str) -> dict[str, Any]:
        """The schema of one call."""
        given = self._functions[name].parameters or {"type": "object", "properties": {}}
        arguments = {key: value for key, value in given.items() if key != "$schema"}
        arguments["$id"] = f"urn:function:{name}"  # what "#/$defs/x" in it refers to
        return {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
