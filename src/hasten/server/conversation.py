"""A conversation as OpenAI describes it, and its token ids.

https://platform.openai.com/docs/api-reference/chat. The chat template sees the messages, the tools,
`chat_template_kwargs` and `reasoning_effort` of a request.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from hasten.errors import ConfigError, HastenError
from hasten.server.bodies import COMMON_NEUTRAL, MANY, Body, Count, Neutral, RequestBody, SamplingBody, Text
from hasten.server.responses import ApiError
from hasten.server.service import Service
from hasten.text.chat import check_template_kwargs, plain_messages

Name = Annotated[str, Field(min_length=1, max_length=256)]


class ConversationPart(Body):
    """A part of a conversation. Unknown fields are dropped, because clients send back answers of other servers too."""

    model_config = ConfigDict(extra="ignore")


class TextPart(ConversationPart):
    """A part of a message. Images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class FunctionCall(ConversationPart):
    """A function call by the assistant; the arguments are JSON in a string."""

    name: Name
    arguments: Text


class ToolCall(ConversationPart):
    """One call of an earlier turn."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(ConversationPart):
    """One turn. The further fields of an assistant's answer may be sent back with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # the same by its other name
    neutral: ClassVar[Neutral] = {"refusal": (), "audio": (), "function_call": ()}


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    bookkeeping = frozenset({"cache_control"})


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function
    bookkeeping = frozenset({"cache_control"})


class NamedFunction(Body):
    """The name in a forced choice."""

    name: Name


class ToolChoice(Body):
    """Forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


def _check_parts(messages: Any) -> Any:
    """Refuse more than `MANY` parts and calls in all messages together, before any of them is parsed."""
    if isinstance(messages, list):
        lists = (message.get(name) for message in messages if isinstance(message, dict) for name in _LISTS)
        if sum(len(items) for items in lists if isinstance(items, list)) > MANY:
            raise PydanticCustomError("too_long", "The messages have more than {most} parts and calls", {"most": MANY})
    return messages


_LISTS = ("content", "tool_calls")
TOOLS = 128
Messages = Annotated[list[Message], Field(min_length=1, max_length=MANY, fail_fast=True), BeforeValidator(_check_parts)]
ToolList = Annotated[list[Tool], Field(max_length=TOOLS, fail_fast=True)]


class TemplateBody(RequestBody):
    """The fields that decide how the chat template renders a conversation.

    continue_final_message: the answer continues the last message. add_generation_prompt: whether the text ends with
    the beginning of an answer; by default unless the last message is continued.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatBody(SamplingBody, TemplateBody):
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
        "audio": (),
        "chat_template": (),  # a template is a program: only the model's own is run
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }


async def encode_conversation(
    messages: Sequence[Message],
    body: TemplateBody,
    service: Service,
    *,
    tools: list[dict[str, Any]] | None,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of the conversation in the model's own template, up to where the answer begins."""
    continued = body.continue_final_message is True
    prompted = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    variables = _variables(body, service.settings.chat_template_kwargs)
    tokenizer = service.tokenizer

    def render() -> str:
        return tokenizer.render_chat(
            plain_messages([message.model_dump(exclude_none=True) for message in messages]),
            add_generation_prompt=prompted,
            continue_final_message=continued,
            tools=tools,
            chat_template_kwargs=variables,
        )

    if continued and prompted:
        message = "add_generation_prompt begins a new turn, continue_final_message continues the last one; give one"
        raise ApiError(message, param="add_generation_prompt")
    try:  # a template is a program: it never runs on the event loop
        text = await service.in_thread(render)
    except HastenError as error:
        raise ApiError(str(error)[:500], param="messages", code="chat_template") from None
    return await service.encode(text, add_special_tokens=add_special_tokens, param="messages")


def _variables(body: TemplateBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template: the server's, the effort, and the request's own."""
    given = body.chat_template_kwargs or {}
    try:
        check_template_kwargs(given)
    except ConfigError as error:
        raise ApiError(f"chat_template_kwargs: {error}"[:500], param="chat_template_kwargs") from None
    effort: dict[str, Any] = {}
    if body.reasoning_effort == "none":
        effort = {"enable_thinking": False, "thinking": False}  # Qwen's and DeepSeek's names
    elif body.reasoning_effort is not None:
        effort = {"reasoning_effort": body.reasoning_effort}
    return {**defaults, **effort, **given}
