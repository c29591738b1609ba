"""Items and tools of /v1/responses, and the chat messages and functions that the model's template is given for them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from hasten.server.answers import Json
from hasten.server.bodies import FUNCTION_NAME, MANY, ConversationPart, Name, Text, TextPart, check_parts
from hasten.server.errors import ApiError
from hasten.server.tools import ParsedCall

CallId = Annotated[str, Field(max_length=256)]


class ItemText(ConversationPart):
    """A text in an item. Images and files are refused."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


ItemTexts = Text | Annotated[list[ItemText], Field(max_length=MANY, fail_fast=True)]


class MessageItem(ConversationPart):
    """One turn of text."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemTexts


class ReasoningItem(ConversationPart):
    """Reasoning of an earlier answer. What another server encrypted is left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ItemText], Field(max_length=MANY, fail_fast=True)] | None = None


class CallItem(ConversationPart):
    """A call of an earlier answer; the arguments are JSON in a string."""

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: Text
    namespace: Name | None = None


class CustomCallItem(ConversationPart):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: Name
    input: Text


class OutputItem(ConversationPart):
    """What a tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: ItemTexts


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem | OutputItem
Tagged = Annotated[Item, Field(discriminator="type")]


def _name_messages(items: Any) -> Any:
    """Add the type of items that have none: messages."""
    if not isinstance(check_parts(items), list):
        return items
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in items]


ItemList = Annotated[
    list[Tagged], Field(min_length=1, max_length=MANY, fail_fast=True), BeforeValidator(_name_messages)
]
_ITEMS = TypeAdapter[list[Item]](list[Tagged])


def read_items(given: list[Json]) -> list[Item]:
    """Items of an answer, as they would come back in a request."""
    return _ITEMS.validate_python(given)


class CustomFormat(ConversationPart):
    """The grammar of a custom tool's input: shown to the model, not enforced."""

    type: Literal["text", "grammar"] = "text"
    syntax: Annotated[str, Field(max_length=64)] | None = None
    definition: Text | None = None


class ItemTool(ConversationPart):
    """A function, a custom tool (its input is one text), a namespace of functions, or one that runs at OpenAI."""

    type: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)] | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: Annotated[list[ItemTool], Field(max_length=1024, fail_fast=True)] | None = None


class Offered:
    """The tools of one request as functions, and the way back from a call of one to an item.

    tools: as a ChatBody has them. left_out: names of those that this server does not run, for `x-hasten-ignored`.
    """

    def __init__(self, given: list[ItemTool]) -> None:
        self.tools: list[Json] = []
        self.left_out: list[str] = []
        self._origin: dict[str, tuple[str, str | None, bool]] = {}  # shown name -> name, namespace, custom
        for tool in given:
            if tool.type == "namespace":
                for inner in tool.tools or ():
                    self._add(inner, namespace=tool.name)
            else:
                self._add(tool, namespace=None)

    def shown_name(self, name: str, namespace: str | None) -> str:
        """The name under which the model knows a function."""
        wanted = (name, namespace)
        return next((shown for shown, origin in self._origin.items() if origin[:2] == wanted), name)

    def item_of(self, call: ParsedCall, *, call_id: str) -> Json:
        """The item of a call, without id and status."""
        name, namespace, custom = self._origin[call.name]
        if custom:
            return {"type": "custom_tool_call", "call_id": call_id, "name": name, "input": _input(call.arguments)}
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": call.arguments}
        return item if namespace is None else item | {"namespace": namespace}

    def _add(self, tool: ItemTool, *, namespace: str | None) -> None:
        if tool.type not in ("function", "custom"):
            self.left_out.append(f"tools.{tool.type}")
            return
        if tool.name is None:
            raise ApiError(f"tools: a tool of type {tool.type} has no name", param="tools")
        shown = tool.name
        if shown in self._origin and namespace is not None:  # a function of this name is in another namespace
            shown = f"{namespace}.{shown}"
        if shown in self._origin:
            raise ApiError("tools: two functions have the same name", param="tools")
        description, parameters = tool.description, tool.parameters
        if tool.type == "custom":
            properties = {"input": {"type": "string"}}
            parameters = {"type": "object", "properties": properties, "required": ["input"]}
            if tool.format is not None and tool.format.definition:
                syntax = tool.format.syntax or "grammar"
                description = f"{description or ''}\n\nThe input follows this {syntax}:\n{tool.format.definition}"
        self._origin[shown] = (tool.name, namespace, tool.type == "custom")
        function = {"name": shown, "description": description, "parameters": parameters}
        self.tools.append({"type": "function", "function": function})


def messages_of(items: list[Item], offered: Offered) -> list[Json]:
    """Chat messages. Reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[Json] = []
    reasoning = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning += "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, OutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _content(item.content)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_call(item, offered))
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _call(item: CallItem | CustomCallItem, offered: Offered) -> Json:
    if isinstance(item, CustomCallItem):
        name, arguments = item.name, json.dumps({"input": item.input}, ensure_ascii=False)
    else:
        name, arguments = offered.shown_name(item.name, item.namespace), item.arguments
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(given: str | list[ItemText]) -> str | list[Json]:
    if isinstance(given, str):
        return given
    return [TextPart(type="text", text=part.text).model_dump() for part in given]


def _input(arguments: str) -> str:
    """The text in the arguments of a custom tool; they may be cut off."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
