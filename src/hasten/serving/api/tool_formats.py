"""How models write their tool calls, and reading them out of an answer, also while it is still coming.

Which of the common formats a model uses is seen in its chat template:
- Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the other
- Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`
- Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`, several divided by `;`
What looks like a call and is none (no JSON, a name that nobody offered) stays text: nothing that was said is lost.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["hermes", "mistral", "llama"]
MARKERS: dict[Format, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}
END = "</tool_call>"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


def find_format(template: str) -> Format | None:
    """The format that a chat template teaches; None if it has no place for tools or none that is known."""
    if "tools" not in template:
        return None
    for name in ("hermes", "mistral"):
        if MARKERS[name] in template:
            return name
    return "llama" if MARKERS["llama"] in template or '"parameters"' in template else None


class CallReader:
    """Divides an answer into text and calls. format None: the whole answer is calls as JSON (a forced choice)."""

    def __init__(self, names: Collection[str], *, form: Format | None) -> None:
        self._names, self._form = frozenset(names), form
        self._marker = "" if form is None else MARKERS[form]
        self._held = ""
        self._holding = form is None
        self._begun = False  # something was shown, or is certain to be text

    def push(self, text: str) -> str:
        """Take more of the answer; what of it is text for certain."""
        self._held += text
        if self._holding:
            return ""
        place = self._held.find(self._marker)
        if place < 0 and self._form == "llama" and not self._begun and self._held.lstrip()[:1] in ("{", ""):
            self._holding = bool(self._held.strip())
            return ""
        if place >= 0:
            self._holding = True
        else:  # the end may be the beginning of the marker
            longest = min(len(self._marker) - 1, len(self._held))
            kept = next((k for k in range(longest, 0, -1) if self._marker.startswith(self._held[-k:])), 0)
            place = len(self._held) - kept
        shown, self._held = self._held[:place], self._held[place:]
        self._begun = self._begun or bool(shown.strip())
        return shown

    def finish(self) -> tuple[str, list[ParsedCall]]:
        """The answer has ended: the rest of the text, and the calls."""
        held, self._held = self._held, ""
        if not self._holding:
            return held, []
        try:
            calls = self._read(held)
        except (ValueError, RecursionError):
            return held, []
        return ("", calls) if calls else (held, [])

    def _read(self, text: str) -> list[ParsedCall]:
        """Raises ValueError for what is not calls to the end."""
        if self._form is None:
            found = json.loads(text)
            return [self._call(item) for item in (found if isinstance(found, list) else [found])]
        if self._form == "hermes":
            return self._read_hermes(text)
        if self._form == "mistral":
            return self._read_mistral(text)
        rest, calls = text.removeprefix(self._marker).strip(), []
        while rest:
            item, end = _DECODER.raw_decode(rest)
            calls.append(self._call(item))
            rest = rest[end:].lstrip().removeprefix(";").strip()
        return calls

    def _read_hermes(self, text: str) -> list[ParsedCall]:
        calls, rest = [], text.strip()
        while rest:
            if not rest.startswith(self._marker):
                raise ValueError("text after a call")
            body, _, rest = rest.removeprefix(self._marker).partition(END)
            calls.append(self._call(json.loads(body)))
            rest = rest.strip()
        return calls

    def _read_mistral(self, text: str) -> list[ParsedCall]:
        calls: list[ParsedCall] = []
        for part in text.split(self._marker)[1:]:
            part = part.strip()
            if part.startswith(("[{", "{")) or part == "[]":
                found, end = _DECODER.raw_decode(part)
                calls += [self._call(item) for item in (found if isinstance(found, list) else [found])]
            else:  # name[ARGS]{…}, or name{…}
                head, brace, _ = part.partition("{")
                arguments, end = _DECODER.raw_decode(brace and part[len(head) :])
                end += len(head)
                calls.append(self._call({"name": head.split("[")[0].strip(), "arguments": arguments}))
            if part[end:].strip():
                raise ValueError("text after a call")
        return calls

    def _call(self, item: Any) -> ParsedCall:
        if not isinstance(item, dict) or item.get("name") not in self._names:
            raise ValueError("no call of a function that was offered")
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no object")
        return ParsedCall(item["name"], json.dumps(arguments, ensure_ascii=False))
