"""Chat templates: from a list of messages to the one string a model was trained on.

A checkpoint brings its template as Jinja source (https://huggingface.co/docs/transformers/chat_templating). The source
comes from outside, so it runs in Jinja's immutable sandbox, sees nothing but JSON values, and is stopped when it
counts or repeats too much. That keeps it from reaching the machine; it is no full bound on time or memory (a string
method can still pad a text to any width), so treat the template of a stranger as you treat the model.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hasten.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jinja2 import Template

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# What a template gets by these names is decided by the conversation or by this file.
MAX_NESTING = 200  # levels of lists and objects in messages, tools and variables
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "range")


@dataclass(frozen=True)
class ChatTemplate:
    """One Jinja chat template and where it came from.

    source: the Jinja text. origin: the file (or "argument") that errors name.
    """

    source: str
    origin: str

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str, str]]:
        return ChatTemplate, (self.source, self.origin)  # a compiled template cannot be sent to another process

    def check(self) -> None:
        """Raise CheckpointError for what is no Jinja: else the first conversation would find out."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> "Template":
        from jinja2 import TemplateSyntaxError

        from hasten.text.chat_sandbox import environment

        try:
            return environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"chat template of {self.origin}: syntax error in line {error.lineno}: {error.message}; "
                "fix the template or pass another one"
            ) from error
        except RecursionError as error:
            raise CheckpointError(f"chat template of {self.origin}: nested too deeply to be compiled") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render as transformers' `apply_chat_template(..., tokenize=False)` does.

        special_tokens: name to text (`bos_token`, `eos_token`, ...), visible to the template under these names.
        continue_final_message: end the text with the last message's content, so that the model continues it.
        chat_template_kwargs: further variables of the template, JSON values, such as {"enable_thinking": False}.
        Raises ConfigError where the messages do not suit the template (it refused them, or a key it needs is missing),
        CheckpointError where the template itself is at fault. A template that takes more than MAX_LOOP_STEPS numbers
        out of `range` in one rendering is stopped (Jinja's own bound of 100,000 holds for a single `range`).
        """
        chat = check_messages(messages)
        schemas = None if tools is None else [_as_json(tool, where=f"tools[{i}]") for i, tool in enumerate(tools)]
        variables: dict[str, Any] = {**special_tokens, **check_template_kwargs(chat_template_kwargs or {})}
        from hasten.text.chat_sandbox import bounded_range

        variables |= {"messages": chat, "tools": schemas, "documents": None, "range": bounded_range()}
        variables["add_generation_prompt"] = add_generation_prompt
        if not continue_final_message:
            return self._render(variables)
        if add_generation_prompt:
            raise ConfigError("continue_final_message needs add_generation_prompt=False: it begins no new turn")
        return self._render_open(variables, last=chat[-1])

    def _render_open(self, variables: dict[str, Any], *, last: dict[str, Any]) -> str:
        """Render up to the end of the last message's content, found by a mark put behind it."""
        content, mark = last.get("content"), uuid4().hex
        if not isinstance(content, str) or not content.strip():
            raise ConfigError("continue_final_message needs text in the last message's content to continue")
        last["content"] = f"{content}{mark} "  # the space is gone from a template that trims
        text = self._render(variables)
        end = text.rfind(mark)
        if end < 0:
            raise ConfigError(
                f"the chat template of {self.origin} leaves out the end of the last message, so it cannot be continued"
            )
        return text[:end] if text.startswith(" ", end + len(mark)) else text[:end].rstrip()

    def _render(self, variables: dict[str, Any]) -> str:
        from jinja2 import UndefinedError
        from jinja2.exceptions import SecurityError

        from hasten.text.chat_sandbox import RaisedByTemplate

        compiled = self._compiled
        try:
            return compiled.render(variables)
        except RaisedByTemplate as error:
            raise ConfigError(f"the chat template of {self.origin} refuses these messages: {error.message}") from error
        except SecurityError as error:
            raise CheckpointError(f"chat template of {self.origin}: refused by the sandbox: {error}") from error
        except UndefinedError as error:
            raise ConfigError(
                f"the chat template of {self.origin} needs something these messages do not have: {error}; "
                "each message usually has 'role' and 'content'"
            ) from error
        except Exception as error:  # a template is a program: it can fail in every way
            raise CheckpointError(
                f"chat template of {self.origin}: failed with {type(error).__name__}: {error}; "
                "fix the template or pass another one"
            ) from error


def check_messages(messages: Sequence[Mapping[str, Any]], *, where: str = "messages") -> list[dict[str, Any]]:
    """Messages rebuilt from plain JSON values, so that a template never meets an object with methods of its own.

    Keys whose value is None are dropped and the names of a reasoning field are completed, both as transformers does.
    Raises ConfigError, which calls them `where`, for anything that is not a non-empty list of mappings of JSON values.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise ConfigError(f"{where} must be a list of {{'role', 'content'}} mappings, found {type(messages).__name__}")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}[{i}] must be a mapping with 'role' and 'content', found {message!r:.80}")
        given = {name: value for name, value in message.items() if value is not None}
        try:
            fields: dict[str, Any] = _as_json(given, where=f"{where}[{i}]")
        except RecursionError:
            raise ConfigError(f"{where}[{i}] is nested too deeply") from None
        reasoning = next((fields[name] for name in _REASONING_NAMES if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        plain.append(fields)
    if not plain:
        raise ConfigError(f"{where} is empty: a chat needs at least one message")
    return plain


def check_template_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables rebuilt from plain JSON values. Raises ConfigError for others, and for a name in RESERVED."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"chat_template_kwargs must be a mapping of names to values; found {given!r:.80}")
    for name in RESERVED:
        if name in given:
            raise ConfigError(f"{name!r} cannot be given to the chat template this way")
    plain: dict[str, Any] = _as_json(given, where="chat_template_kwargs")
    return plain


def parse_template_kwargs(text: str | None, *, option: str) -> dict[str, Any]:
    """The variables in a JSON object on the command line; none without one. Raises ConfigError naming the option."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError(f"found {text:.80}")
        return check_template_kwargs(given)
    except (ValueError, RecursionError) as error:
        example = """'{"enable_thinking": false}'"""
        raise ConfigError(f"{option} takes a JSON object such as {example}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, where: str = "messages", complete: bool = False
) -> list[dict[str, Any]]:
    """OpenAI's messages as most templates expect them. Raises ConfigError as `check_messages` does.

    Content is one text (parts joined by line ends, missing content empty), "developer" is "system", and the arguments
    of tool calls are objects, where OpenAI's API has their JSON text. complete: each message must have a role, and text
    or calls of named functions, as text to train on.
    """
    plain = []
    for i, message in enumerate(check_messages(messages, where=where)):
        name = f"{where}[{i}]"
        fields = {**message, "content": _text(message.get("content", ""), name=name)}
        if fields.get("role") == "developer":
            fields["role"] = "system"
        calls = fields.pop("tool_calls", None) or []
        if not isinstance(calls, list):
            raise ConfigError(f"{name}['tool_calls'] must be a list of calls, found {calls!r:.80}")
        if complete:
            _check_complete(message, calls, name=name)
        if calls:
            fields["tool_calls"] = calls
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                call |= {"id": "", "type": "function"} | call
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = call_arguments(function["arguments"])
        plain.append(fields)
    return plain


def _text(content: Any, *, name: str) -> Any:
    """A message's content, its text parts joined."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(
                f"{name}.content[{number}] must be {{'type': 'text', 'text': …}}, the only kind of part that is read; "
                f"found {content[number]!r:.60}"
            )
    return "\n".join(texts)


def _check_complete(message: Mapping[str, Any], calls: Sequence[Any], *, name: str) -> None:
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"{name} must be an object with 'role' and 'content', found {message!r:.60}")
    content = message.get("content", "" if calls else None)
    if not isinstance(content, str | list):
        raise ConfigError(f"{name} must have text or text parts in 'content' (or 'tool_calls'), found {content!r:.60}")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"{name}.tool_calls[{number}] must be an object with a 'function' that has a 'name', found {call!r:.60}"
            )
        function.setdefault("arguments", {})


def call_arguments(text: str) -> Any:
    """The arguments of a tool call as an object; the text itself where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _as_json(value: Any, *, where: str, levels: int = MAX_NESTING) -> Any:
    """The value rebuilt. Raises RecursionError where it is nested deeper than `levels`, whatever Python's own limit."""
    if not levels:
        raise RecursionError(f"nested deeper than {MAX_NESTING} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # a subclass (an enum, say) may carry methods: keep its plain value only
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        bad = next((key for key in value if not isinstance(key, str)), None)
        if bad is not None:
            raise ConfigError(f"{where} has the key {bad!r}: keys must be strings")
        items = ((key, _as_json(item, where=f"{where}[{key!r}]", levels=levels - 1)) for key, item in value.items())
        return {str.__str__(key): item for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, where=f"{where}[{i}]", levels=levels - 1) for i, item in enumerate(value)]
    raise ConfigError(f"{where} is a {type(value).__name__}: only text, numbers, lists and mappings can be in a chat")
