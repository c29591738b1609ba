"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from hasten.serving.api.asking import beams, check_ids, check_logprobs, room, samples, sampling_params, usage_wanted
from hasten.serving.api.chat_schema import ChatBody
from hasten.serving.api.conversation import encode_conversation
from hasten.serving.api.documentation import ERRORS, ChatCompletion
from hasten.serving.api.errors import ApiError
from hasten.serving.api.logprobs import chat_logprobs
from hasten.serving.api.replies import EventStream, reply
from hasten.serving.api.response_format import constraint_of
from hasten.serving.api.running import RequestRun
from hasten.serving.api.service import Service
from hasten.serving.api.tool_choice import Tools
from hasten.serving.api.tool_formats import CallReader, ParsedCall
from hasten.serving.request import Request, RequestOutput, TokenLogprob


@dataclass(slots=True)
class _Choice:
    """One answer while it grows."""

    reader: CallReader | None
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    begun: bool = False


def chat_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        http.state.facts.update({} if body.user is None else {"user": body.user})
        answer = _Answer(service, body)
        run = RequestRun(service, http, [await answer.request(http.state.request_id)])
        first = await anext(run)  # what cannot be served is told by its status, before anything is sent
        if body.stream:
            return EventStream(answer.chunks(first[1], run))
        answer.take(first[1])
        async for _, piece in run:
            answer.take(piece)
        return reply(answer.whole(run))

    return router


class _Answer:
    """The choices of one request, and the shapes in which they are told."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.service, self.body = service, body
        settings = service.settings
        self.n, self.best_of = samples(body, settings, prompts=1)
        self.tools = Tools(body, service)
        self.choices = [_Choice(self.tools.reader()) for _ in range(self.n)]
        self.id = ""
        self.created = int(time.time())
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        check_logprobs(body.top_logprobs, settings, param="top_logprobs")
        self.usage, self.always = usage_wanted(body)
        limits = (body.max_tokens, body.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ApiError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")

    async def request(self, name: str) -> Request:
        """What the engine is asked."""
        body, service = self.body, self.service
        self.id = f"chatcmpl-{name}-{service.number()}"
        constraint = await self.tools.constraint()
        if constraint is None:
            constraint = await constraint_of(body.response_format, service)
        special = body.add_special_tokens is True  # the template writes them itself
        ids = await encode_conversation(body.messages, service, tools=self.tools.shown, add_special_tokens=special)
        prompt = check_ids(ids, service, param="messages")
        name_of = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = getattr(body, name_of)
        if wanted == 0:
            raise ApiError(f"{name_of} is 0: an answer has at least one token", param=name_of)
        most = room(prompt, wanted, service, param="messages", wanted_by=name_of, default=None)
        return Request(
            id=self.id,
            prompt=prompt,
            params=sampling_params(body, service, max_tokens=most, constrained=constraint is not None),
            **beams(body, self.n, self.best_of),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            priority=body.priority or 0,
            salt=body.cache_salt or "",
            timeout=service.settings.request_timeout,
            constraint=constraint,
            skip_special_tokens=self.tools.skip_special_tokens(body.skip_special_tokens is not False),
        )

    def take(self, piece: RequestOutput) -> dict[str, Any] | None:
        """Add a piece to its choice; what is new, as the choice of a chunk (None if nothing is)."""
        choice = self.choices[piece.index]
        text, calls = piece.text, list[ParsedCall]()
        if choice.reader is not None:
            text = choice.reader.push(text)
            if piece.finish_reason is not None:
                rest, calls = choice.reader.finish()
                text += rest
                if not self.tools.parallel:
                    calls = calls[:1]
        delta: dict[str, Any] = {}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": i, **self._call(call)} for i, call in enumerate(calls)]
        reason: str | None = piece.finish_reason
        if calls and not self.tools.named and reason == "stop":
            reason = "tool_calls"
        choice.calls += calls
        choice.finish_reason = reason
        if not self.body.stream:
            choice.content += text
            choice.tokens += piece.logprobs or ()
        if not delta and reason is None and not piece.logprobs:
            return None
        told: dict[str, Any] = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if self.body.logprobs:
            told["logprobs"] = chat_logprobs(piece.logprobs or ())
        if isinstance(piece.stop_reason, (str, int)):
            told["stop_reason"] = piece.stop_reason
        return told

    async def chunks(self, first: RequestOutput, run: RequestRun) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream; each choice begins with the role."""

        def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
            made = self._envelope("chat.completion.chunk", choices)
            if self.usage or self.always:
                made["usage"] = run.usage() if self.always else None
            return made

        piece: RequestOutput | None = first
        while piece is not None:
            choice = self.choices[piece.index]
            told = self.take(piece)
            if not choice.begun:
                choice.begun = True
                role = {"role": "assistant", "content": ""}
                yield chunk([{"index": piece.index, "delta": role, "logprobs": None, "finish_reason": None}])
            if told is not None:
                yield chunk([told])
            following = await anext(run, None)
            piece = None if following is None else following[1]
        if self.usage:
            yield self._envelope("chat.completion.chunk", []) | {"usage": run.usage()}

    def whole(self, run: RequestRun) -> dict[str, Any]:
        """The whole response."""
        told = []
        for index, choice in enumerate(self.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
            if choice.calls:
                message["content"] = choice.content or None
                message["tool_calls"] = [self._call(call) for call in choice.calls]
            logprobs = chat_logprobs(choice.tokens) if self.body.logprobs else None
            entry = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            told.append(entry)
        return self._envelope("chat.completion", told) | {"usage": run.usage()}

    def _call(self, call: ParsedCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "id": f"call_{self.id.rsplit('-', 1)[1]}_{self.service.number()}",
            "type": "function",
            "function": function,
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }
