"""A conversation as OpenAI describes it, and its token ids.

https://platform.openai.com/docs/api-reference/chat. Nothing of a request reaches the chat template but its messages and
its tools.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hasten.errors import HastenError
from hasten.serving.api.fields import COMMON_NEUTRAL, MANY, Body, Count, Neutral, SamplingBody, Text
from hasten.serving.api.responses import ApiError
from hasten.serving.api.service import Service

Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Body):
    """A part of a message. Images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    """What an assistant called; the arguments are JSON in a string."""

    name: Name
    arguments: Text


class ToolCall(Body):
    """One call of an earlier turn."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    neutral: ClassVar[Neutral] = {"index": (0, 1, 2, 3)}  # left over from a stream that was put together


class Message(Body):
    """One turn. What an assistant's answer carried beside its text may be sent back with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    neutral: ClassVar[Neutral] = {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()}


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; only functions there are."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name in a forced choice."""

    name: Name


class ToolChoice(Body):
    """This function must be called."""

    type: Literal["function"]
    function: NamedFunction


def _few_parts(messages: Any) -> Any:
    """Refuses, before any is looked at, more parts and calls than `MANY` in all messages together."""
    if isinstance(messages, list):
        lists = (message.get(name) for message in messages if isinstance(message, dict) for name in _LISTS)
        if sum(len(items) for items in lists if isinstance(items, list)) > MANY:
            raise PydanticCustomError("too_long", "The messages have more than {most} parts and calls", {"most": MANY})
    return messages


_LISTS = ("content", "tool_calls")
TOOLS = 128
Messages = Annotated[list[Message], Field(min_length=1, max_length=MANY, fail_fast=True), BeforeValidator(_few_parts)]
ToolList = Annotated[list[Tool], Field(max_length=TOOLS, fail_fast=True)]


class ChatBody(SamplingBody):
    """A conversation; the answer has n choices."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    neutral: ClassVar[Neutral] = COMMON_NEUTRAL | {
        "add_generation_prompt": (True,),
        "audio": (),
        "chat_template": (),  # nothing of a request reaches the template but its messages and tools
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_cache_key": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }


async def encode_conversation(
    messages: Sequence[Message],
    service: Service,
    *,
    tools: list[dict[str, Any]] | None,
    add_special_tokens: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the conversation in the model's own template, up to where the answer begins."""
    plain = [_plain(message) for message in messages]
    tokenizer = service.tokenizer

    def render() -> str:
        return tokenizer.render_chat(plain, add_generation_prompt=add_generation_prompt, tools=tools)

    try:  # a template is a program: it is never run where it could hold up everybody
        text = await service.in_thread(render)
    except HastenError as error:
        raise ApiError(str(error)[:500], param="messages", code="chat_template") from None
    return await service.encode(text, add_special_tokens=add_special_tokens, param="messages")


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text in one piece, "developer" by its older name, arguments as values."""
    plain = {name: value for name, value in message.model_dump().items() if value is not None and value != []}
    content = plain.get("content", "")
    plain["content"] = "\n".join(part["text"] for part in content) if isinstance(content, list) else content
    if message.role == "developer":
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        call["id"] = call["id"] or ""
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
