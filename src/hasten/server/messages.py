"""/v1/messages and /v1/messages/count_tokens, Anthropic's protocol: https://docs.anthropic.com/en/api/messages

A body is read into a `ChatBody`; what its outputs add becomes the events of a stream, whose sum is the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field

from hasten.engine.request import Request, RequestOutput
from hasten.server.answers import AnswerBuilder, EventStream, Json, after, reply
from hasten.server.bodies import (
    FUNCTION_NAME,
    MANY,
    STOPS,
    ChatBody,
    ConversationPart,
    Count,
    Effort,
    ModelBody,
    Name,
    Neutral,
    Probability,
    Stop,
    Text,
    check_parts,
)
from hasten.server.chat import ChatTurn, body_of, count_tokens_of
from hasten.server.documentation import ANTHROPIC_ERRORS, STREAMED, MessagesAnswer, TokenCount
from hasten.server.errors import naming_fields
from hasten.server.service import Service
from hasten.server.tools import arguments_of

BILLING = "x-anthropic-billing-header:"  # a line of Claude Code's that differs in each request
# What fields of a ChatBody are called here.
NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
Id = Annotated[str, Field(max_length=256)]


class TextBlock(ConversationPart):
    """Text of a turn, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(ConversationPart):
    """Reasoning of an earlier answer. Its signature has no effect."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinking(ConversationPart):
    """Reasoning that another server encrypted; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUse(ConversationPart):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Id
    name: Name
    input: dict[str, Any]


class ToolResult(ConversationPart):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Text | Annotated[list[TextBlock], Field(max_length=MANY, fail_fast=True)] | None = None


Block = Annotated[TextBlock | ThinkingBlock | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")]


class Turn(ConversationPart):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MANY, fail_fast=True)]


class OfferedTool(ConversationPart):
    """A function that the model may call. One with another `type` would run at Anthropic; it is left out and named."""

    type: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")] | None = None
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: Text | None = None
    input_schema: dict[str, Any] | None = None


class OfferedChoice(ConversationPart):
    """Whether calls may, must or must not come."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ConversationPart):
    """Whether the model reasons first. budget_tokens: most tokens of reasoning, which is then ended."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None


class OutputFormat(ConversationPart):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ConversationPart):
    """How much effort the answer takes, and its form."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class RequestMetadata(ConversationPart):
    """user_id: noted in the log."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountBody(ModelBody):
    """The conversation of a request, whose tokens are counted."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MANY, fail_fast=True), BeforeValidator(check_parts)]
    system: Text | Annotated[list[TextBlock], Field(max_length=MANY, fail_fast=True)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: OfferedChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: RequestMetadata | None = None
    bookkeeping = (ModelBody.bookkeeping - {"metadata"}).union(
        ("diagnostics", "inference_geo", "user_profile_id", "workspace_id")
    )
    neutral: ClassVar[Neutral] = {"container": (), "mcp_servers": ([],), "output_format": (), "speed": ("standard",)}

    def without_effect(self) -> list[str]:
        """Names of what this server leaves out."""
        return [f"tools.{tool.type}" for tool in self.tools or () if tool.type not in (None, "custom")]

    @property
    def budget(self) -> int | None:
        """Most tokens of reasoning."""
        enabled = self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if enabled and self.thinking is not None else None

    def chat(self, **fields: Any) -> ChatBody:
        """The same as a ChatBody."""
        choice = self.tool_choice or OfferedChoice(type="auto")
        offered = [tool for tool in self.tools or () if tool.type in (None, "custom")]
        if offered:
            fields["tools"] = [_tool(tool) for tool in offered]
            fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = choice.disable_parallel_tool_use is not True
        if choice.type == "tool":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
        elif choice.type == "any" and not offered:
            fields["tool_choice"] = "required"
        config = self.output_config or OutputConfig()
        if config.format is not None:
            named = {"name": "answer", "schema": config.format.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        disabled = self.thinking is not None and self.thinking.type == "disabled"
        fields["reasoning_effort"] = "none" if disabled else config.effort
        if self.thinking is not None and self.thinking.type == "enabled":
            fields["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}  # Qwen's and DeepSeek's names
        messages = [*_system(self.system), *_turns(self.messages)]
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True
        return body_of(ChatBody, model=self.model, messages=messages, **fields)


class MessagesBody(CountBody):
    """A conversation to answer."""

    max_tokens: Count
    stop_sequences: Annotated[list[Stop], Field(max_length=STOPS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None


def add_messages(router: APIRouter, service: Service) -> None:

    @router.post("/v1/messages", response_model=MessagesAnswer, responses=ANTHROPIC_ERRORS | STREAMED)
    async def messages(body: MessagesBody, http: HttpRequest) -> Response:
        """Answer a conversation, in Anthropic's protocol."""
        left_out = body.without_effect()
        same = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        if body.budget is not None and service.has_tokenizer:
            if (await service.answer_format(tools=bool(body.tools))).reasoning is None:
                left_out.append("thinking.budget_tokens")
            else:
                same["thinking_budget_tokens"] = body.budget
        service.check_in(body, http, without_effect=left_out)
        _note_user(body, http)
        with naming_fields(NAMES):
            return await _Answer(service, body.chat(stop=body.stop_sequences, **same)).respond(http)

    @router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ANTHROPIC_ERRORS)
    async def count_tokens(body: CountBody, http: HttpRequest) -> Response:
        """Count the tokens of a conversation."""
        service.check_in(body, http, without_effect=body.without_effect())
        _note_user(body, http)
        with naming_fields(NAMES):
            return reply({"input_tokens": await count_tokens_of(body.chat(), service)})


class _Answer(AnswerBuilder[ChatBody]):
    """One message of content blocks. A part of it is an event."""

    ping: ClassVar[Json] = {"type": "ping"}

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body, prompts=1)
        self.turn = ChatTurn(body, service, self.samples, fold=True)
        self._blocks: list[Json] = []
        self._open: Json | None = None  # the block that is open
        self._input = ""  # what has come of the input of a call that is open
        self._message: Json = {}
        self._called = False

    async def requests(self, name: str) -> list[Request]:
        self.id = f"msg_{name}-{self.service.number()}"
        self._name = name
        return [await self.turn.request(self.id)]

    def take(self, which: int, output: RequestOutput) -> list[Json]:
        events: list[Json] = []
        if not self._message:
            self._message = {"id": self.id, "type": "message", "role": "assistant", "model": self.body.model}
            self._message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            events.append({"type": "message_start", "message": dict(self._message)})
        said = self.turn.read(output)
        if said.reasoning:
            events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._blocks[-1]["thinking"] += said.reasoning
            events.append(self._delta({"type": "thinking_delta", "thinking": said.reasoning}))
        if said.text:
            events += self._begin({"type": "text", "text": ""})
            self._blocks[-1]["text"] += said.text
            events.append(self._delta({"type": "text_delta", "text": said.text}))
        for call in said.calls:
            if call.name is not None:
                self._called = True
                number = f"toolu_{self.id[4:]}_{self.service.number()}"
                events += self._begin({"type": "tool_use", "id": number, "name": call.name, "input": {}}, new=True)
            if call.arguments:
                self._input += call.arguments
                events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        if said.finish_reason is not None:
            reason = "tool_calls" if self._called and said.finish_reason == "stop" else said.finish_reason
            end = {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}
            if reason == "stop" and isinstance(output.stop_reason, str):
                end = {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
            events += self._close()
            self._message |= end | {"usage": self._usage(), "content": self._blocks}
            events += [{"type": "message_delta", "delta": end, "usage": self._usage()}, {"type": "message_stop"}]
        return events

    def stream(self, first: Json, parts: AsyncIterator[Json]) -> EventStream:
        return EventStream(after(first, parts), named=True, failure=lambda error: error.anthropic_body(self._name))

    def whole(self, parts: list[Json]) -> Json:
        return self._message

    def _begin(self, block: Json, *, new: bool = False) -> list[Json]:
        """Begin a block, unless one of its kind goes on; its event has a copy, since the block goes on."""
        if self._open is not None and self._open["type"] == block["type"] and not new:
            return []
        events = self._close()
        self._open = block
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        """End the block that is open."""
        block, self._open = self._open, None
        if block is None:
            return []
        events = [{"type": "content_block_stop", "index": len(self._blocks) - 1}]
        if block["type"] == "thinking":
            events.insert(0, self._delta({"type": "signature_delta", "signature": ""}))
        elif block["type"] == "tool_use":
            block["input"], self._input = arguments_of(self._input), ""
        return events

    def _usage(self) -> Json:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
        }


def _note_user(body: CountBody, http: HttpRequest) -> None:
    if body.metadata is not None and body.metadata.user_id is not None:
        http.state.facts["user"] = body.metadata.user_id


def _tool(tool: OfferedTool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _system(given: str | list[TextBlock] | None) -> list[Json]:
    """The system message, without Claude Code's billing line, so that the prefix cache finds the rest."""
    texts = [given] if isinstance(given, str) else [block.text for block in given or ()]
    kept = [{"type": "text", "text": text} for text in texts if text and not text.startswith(BILLING)]
    return [{"role": "system", "content": kept}] if kept else []


def _turns(turns: list[Turn]) -> list[Json]:
    """Chat messages. Results of tools come before the text of their turn, as messages of their own."""
    messages: list[Json] = []
    for turn in turns:
        blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        for block in blocks:
            if isinstance(block, ToolResult):
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block.content)})
        message: Json = {"role": turn.role}
        texts = [{"type": "text", "text": block.text} for block in blocks if isinstance(block, TextBlock)]
        if turn.role == "system":
            texts = [text for text in texts if not text["text"].startswith(BILLING)]
        calls = [_call(block) for block in blocks if isinstance(block, ToolUse)]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        if texts:
            message["content"] = texts
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if texts or calls or thoughts:
            messages.append(message)
    return messages


def _result(content: str | list[TextBlock] | None) -> str | list[Json]:
    if isinstance(content, list):
        return [{"type": "text", "text": block.text} for block in content]
    return content or ""


def _call(block: ToolUse) -> Json:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
