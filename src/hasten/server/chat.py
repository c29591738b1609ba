"""Conversations, and /v1/chat/completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import ValidationError

from hasten.engine.request import Request, RequestOutput
from hasten.server.answers import ChoiceBuilder, Json, chat_logprobs, join_logprobs
from hasten.server.bodies import ChatBody, SamplingBody
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
from hasten.server.documentation import ERRORS, STREAMED, ChatCompletion
from hasten.server.errors import ApiError, from_validation
from hasten.server.reasoning import AfterReasoning, gate_of
from hasten.server.service import Service
from hasten.server.structured import Grammar
from hasten.server.tools import Tools
from hasten.text.answer_format import AnswerFormat
from hasten.text.answer_reader import AnswerReader, CallPiece

Body = TypeVar("Body", bound=SamplingBody)
_ENDING = 64  # tokens at the end of a prompt in which the template may begin the reasoning


def add_chat(router: APIRouter, service: Service) -> None:

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS | STREAMED)
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        service.check_in(body, http)
        return await _ChatCompletion(service, body).respond(http)


def body_of(kind: type[Body], **fields: Any) -> Body:
    """A body for a request in another protocol. Raises ApiError naming the field."""
    try:
        return kind(**fields)
    except ValidationError as error:
        raise from_validation(error.errors()) from None


@dataclass(slots=True)
class Said:
    """What one output adds to an answer: content, reasoning, pieces of calls; and at its end why it ended."""

    text: str
    calls: list[CallPiece]
    finish_reason: str | None
    reasoning: str = ""


class ChatTurn:
    """A conversation in any protocol: its request to the engine, and how outputs become text, reasoning and calls.

    fold: turns that the template refuses are joined (`build_request.folded`). reasoning_tokens: of all outputs that
    were read; one that ends the reasoning counts to it.
    """

    def __init__(self, body: ChatBody, service: Service, samples: Samples, *, fold: bool = False) -> None:
        self.body, self.service, self.samples, self._fold = body, service, samples, fold
        self.tools = Tools(body, service) if body.tools or body.tool_choice is not None else None
        self._form = AnswerFormat()
        self._readers: list[AnswerReader] = []
        self._called: set[int] = set()
        self.reasoning_tokens = 0
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        check_limit("top_logprobs", body.top_logprobs or 0, service.settings.logprobs)
        limits = (body.max_tokens, body.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ApiError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")

    @property
    def reasons(self) -> bool:
        """Whether the template's answers may have reasoning."""
        return self._form.reasoning is not None

    async def prompt(self) -> tuple[int, ...]:
        """Token ids of the conversation in the model's template."""
        body, service = self.body, self.service
        special = body.add_special_tokens is True  # the template writes them itself
        shown = None if self.tools is None else self.tools.shown
        self._form = await service.answer_format(tools=shown is not None)
        if self.tools is not None:
            self.tools.read_as(self._form)
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
        if body.thinking_budget_tokens is not None and not self.reasons:
            message = "thinking_budget_tokens: the answers of this model's chat template have no reasoning to end"
            raise ApiError(message, param="thinking_budget_tokens")
        most = room(prompt, wanted, service, param="messages", wanted_by=name_of, default=None)
        ending = service.tokenizer.decode(prompt[-_ENDING:], skip_special_tokens=False)
        # Last, because compiling a schema takes longer than refusing anything above.
        grammar = await self._grammar()
        calls = [None if tools is None else tools.reader() for _ in range(self.samples.n)]
        structured = grammar is not None
        self._readers = [AnswerReader(self._form, prompt=ending, calls=one, structured=structured) for one in calls]
        return build_request(
            body,
            service,
            id=name,
            prompt=prompt,
            max_tokens=most,
            samples=self.samples,
            constraint=self._after_reasoning(grammar, ending),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            skip_special_tokens=body.skip_special_tokens is not False and not self._keeps_special(),
        )

    async def _grammar(self) -> Grammar | None:
        """The structure of the answer: of a forced call, or the one that was asked for."""
        grammar = None if self.tools is None else await self.tools.constraint()
        if grammar is None and self.body.response_format is not None:
            grammar = await constraint_of(self.body.response_format, self.service)
        return grammar

    def _after_reasoning(self, grammar: Grammar | None, prompt: str) -> Grammar | AfterReasoning | None:
        """What the answer is held to: a structure, after the reasoning; and the reasoning to its budget."""
        body, tokenizer, budget = self.body, self.service.tokenizer, self.body.thinking_budget_tokens
        if grammar is None and budget is None:
            return None
        gate = gate_of(self._form, tokenizer, prompt=prompt, budget=budget, stops=self._readers[0].stops)
        if gate is None or (body.continue_final_message and not gate.inside):
            return grammar
        return AfterReasoning(gate, tokenizer, grammar)

    def _keeps_special(self) -> bool:
        """Whether a special token is, or is part of, a mark by which the answer is read."""
        return self._form.special or (self.tools is not None and self.service.any_special(self.tools.markers()))

    def read(self, output: RequestOutput) -> Said:
        """Split an output into reasoning, text, and pieces of calls."""
        reader = self._readers[output.index]
        reason: str | None = output.finish_reason
        before = reader.in_reasoning
        found = reader.push(output.text)
        if before or reader.in_reasoning:
            self.reasoning_tokens += len(output.tokens)
        if reason is not None:
            found.add(reader.finish(cut=reason == "length"))
        calls = joined(found.calls) if found.calls else []
        if self.tools is not None and not self.tools.parallel:
            calls = [call for call in calls if call.index == 0]
        if calls:
            self._called.add(output.index)
        if output.index in self._called and reason == "stop" and self.tools is not None and not self.tools.named:
            reason = "tool_calls"
        return Said(found.content, calls, reason, reasoning=found.reasoning)


def joined(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Pieces of the same call that follow each other as one."""
    found: list[CallPiece] = []
    for piece in pieces:
        if found and piece.name is None and found[-1].index == piece.index:
            found[-1] = CallPiece(piece.index, found[-1].name, found[-1].arguments + piece.arguments)
        else:
            found.append(piece)
    return found


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
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.text:
            delta["content"] = said.text
        if said.calls:
            delta["tool_calls"] = [self._call(call) for call in said.calls]
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
        reasoning = "".join(part["delta"].get("reasoning_content", "") for part in parts)
        if reasoning:
            message["reasoning_content"] = reasoning
        calls: list[Json] = []
        for piece in (piece for part in parts for piece in part["delta"].get("tool_calls", ())):
            if "id" in piece:
                calls.append({name: piece[name] for name in ("id", "type")} | {"function": dict(piece["function"])})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        if calls:
            message["content"] = content or None
            message["tool_calls"] = calls
        logprobs = join_logprobs(chat_logprobs(()), parts) if self.body.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs}

    def _usage(self) -> Json:
        details = {"completion_tokens_details": {"reasoning_tokens": self.turn.reasoning_tokens}}
        return super()._usage() | (details if self.turn.reasons else {})

    def _call(self, call: CallPiece) -> Json:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        number = f"call_{self.id.rsplit('-', 1)[1]}_{self.service.number()}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": number, "type": "function", "function": function}
