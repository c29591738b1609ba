"""Conversations, and /v1/chat/completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import ValidationError

from hasten.engine.request import Request, RequestOutput
from hasten.server.answers import ChoiceBuilder, Json, chat_logprobs, join_logprobs
from hasten.server.bodies import ChatBody
from hasten.server.build_request import (
    Samples,
    build_request,
    check_ids,
    check_limit,
    constraint_of,
    encode_conversation,
    room,
    samples_of,
)
from hasten.server.documentation import ERRORS, ChatCompletion
from hasten.server.errors import ApiError, from_validation
from hasten.server.service import Service
from hasten.server.tools import ParsedCall, Tools


def add_chat(router: APIRouter, service: Service) -> None:

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        service.check_in(body, http)
        return await _ChatCompletion(service, body).respond(http)


def chat_body(**fields: Any) -> ChatBody:
    """A ChatBody of a request in another protocol. Raises ApiError naming the field."""
    try:
        return ChatBody(**fields)
    except ValidationError as error:
        raise from_validation(error.errors()) from None


@dataclass(slots=True)
class Said:
    """What one output adds to an answer: its text, and at the end of the answer its calls and why it ended."""

    text: str
    calls: list[ParsedCall]
    finish_reason: str | None


class ChatTurn:
    """A conversation in any protocol: its request to the engine, and how outputs become text and tool calls.

    fold: turns that the template refuses are joined (`build_request.folded`).
    """

    def __init__(self, body: ChatBody, service: Service, samples: Samples, *, fold: bool = False) -> None:
        self.body, self.service, self.samples, self._fold = body, service, samples, fold
        self.tools = Tools(body, service) if body.tools or body.tool_choice is not None else None
        self._readers = [None if self.tools is None else self.tools.reader() for _ in range(samples.n)]
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        check_limit("top_logprobs", body.top_logprobs or 0, service.settings.logprobs)
        limits = (body.max_tokens, body.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ApiError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")

    async def prompt(self) -> tuple[int, ...]:
        """Token ids of the conversation in the model's template."""
        body, service = self.body, self.service
        special = body.add_special_tokens is True  # the template writes them itself
        shown = None if self.tools is None else self.tools.shown
        ids = await encode_conversation(
            body.messages, body, service, tools=shown, add_special_tokens=special, fold=self._fold
        )
        return check_ids(ids, service, param="messages")

    async def request(self, name: str) -> Request:
        """Build the engine's request of this id. Raises ApiError naming the field."""
        body, service, tools = self.body, self.service, self.tools
        prompt = await self.prompt()
        name_of = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = getattr(body, name_of)
        if wanted == 0:
            raise ApiError(f"{name_of} is 0: an answer has at least one token", param=name_of)
        most = room(prompt, wanted, service, param="messages", wanted_by=name_of, default=None)
        # Last, because compiling a schema takes longer than refusing anything above.
        constraint = None if tools is None else await tools.constraint()
        if constraint is None and body.response_format is not None:
            constraint = await constraint_of(body.response_format, service)
        skip_special_tokens = body.skip_special_tokens is not False
        if tools is not None:
            skip_special_tokens = tools.skip_special_tokens(skip_special_tokens)
        return build_request(
            body,
            service,
            id=name,
            prompt=prompt,
            max_tokens=most,
            samples=self.samples,
            constraint=constraint,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            skip_special_tokens=skip_special_tokens,
        )

    def read(self, output: RequestOutput) -> Said:
        """Split an output into text and, at the end of its answer, tool calls."""
        reader, reason = self._readers[output.index], output.finish_reason
        if reader is None or self.tools is None:
            return Said(output.text, [], reason)
        text = reader.push(output.text)
        if reason is None:
            return Said(text, [], None)
        rest, calls = reader.finish(cut=reason == "length")
        if not self.tools.parallel:
            calls = calls[:1]
        called = bool(calls) and not self.tools.named and reason == "stop"
        return Said(text + rest, calls, "tool_calls" if called else reason)


async def count_tokens_of(body: ChatBody, service: Service) -> int:
    """Number of tokens of a conversation, as a request would compute them."""
    turn = ChatTurn(body, service, samples_of(body, service.settings, prompts=1), fold=True)
    return len(await turn.prompt())


class _ChatCompletion(ChoiceBuilder[ChatBody]):
    """n choices. Each begins with the role; its tool calls come at its end."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body, prompts=1)
        self.turn = ChatTurn(body, service, self.samples)
        self._begun: set[int] = set()

    async def requests(self, name: str) -> list[Request]:
        self.id = f"chatcmpl-{name}-{self.service.number()}"
        return [await self.turn.request(self.id)]

    def take(self, which: int, output: RequestOutput) -> list[Json]:
        said = self.turn.read(output)
        parts = []
        if output.index not in self._begun:
            self._begun.add(output.index)
            role = {"role": "assistant", "content": ""}
            parts.append({"index": output.index, "delta": role, "logprobs": None, "finish_reason": None})
        delta: Json = {}
        if said.text:
            delta["content"] = said.text
        if said.calls:
            delta["tool_calls"] = [{"index": i, **self._call(call)} for i, call in enumerate(said.calls)]
        if not delta and said.finish_reason is None and not output.logprobs:
            return parts
        part: Json = {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": said.finish_reason}
        if self.body.logprobs:
            part["logprobs"] = chat_logprobs(output.logprobs or ())
        if output.stop_reason is not None:
            part["stop_reason"] = output.stop_reason
        return [*parts, part]

    def join(self, index: int, parts: list[Json]) -> Json:
        content = "".join(part["delta"].get("content", "") for part in parts)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        logprobs = join_logprobs(chat_logprobs(()), parts) if self.body.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs}

    def _call(self, call: ParsedCall) -> Json:
        number = f"call_{self.id.rsplit('-', 1)[1]}_{self.service.number()}"
        return {"id": number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
