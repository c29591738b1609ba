"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from hasten.serving.api.asking import beams, check_logprobs, prompts_of, room, samples, sampling_params, usage_wanted
from hasten.serving.api.completions_schema import CompletionBody
from hasten.serving.api.documentation import ERRORS, Completion
from hasten.serving.api.errors import ApiError
from hasten.serving.api.logprobs import completion_logprobs
from hasten.serving.api.replies import EventStream, reply
from hasten.serving.api.response_format import constraint_of
from hasten.serving.api.running import RequestRun
from hasten.serving.api.service import Service
from hasten.serving.request import Request, RequestOutput, TokenLogprob

DEFAULT_TOKENS = 16  # OpenAI's


@dataclass(slots=True)
class _Choice:
    """One answer while it grows."""

    text: str = ""
    tokens: list[TokenLogprob | None] = field(default_factory=list)
    offset: int = 0  # characters given so far: where the next token's text begins
    begun: bool = False
    finish_reason: str | None = None


def completions_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=Completion, responses=ERRORS)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        """Continue a prompt."""
        service.check_model(body.model)
        http.state.facts.update({} if body.user is None else {"user": body.user})
        given = await prompts_of(body.prompt, service, param="prompt", add_special_tokens=body.add_special_tokens)
        answer = _Answer(service, body, given)
        run = RequestRun(service, http, await answer.requests(http.state.request_id))
        first = await anext(run)  # what cannot be served is told by its status, before anything is sent
        if body.stream:
            return EventStream(answer.chunks(first, run))
        answer.take(*first)
        async for item in run:
            answer.take(*item)
        return reply(answer.whole(run))

    return router


class _Answer:
    """The choices of one request, and the shapes in which they are told."""

    def __init__(self, service: Service, body: CompletionBody, prompts: list[tuple[int, ...]]) -> None:
        self.service, self.body, self.prompts = service, body, prompts
        self.n, self.best_of = samples(body, service.settings, prompts=len(prompts))
        self.choices = [_Choice() for _ in range(self.n * len(prompts))]
        self.id = ""
        self._scored: dict[int, tuple[TokenLogprob | None, ...]] = {}  # the prompts' log-probabilities
        self.created = int(time.time())
        self.nothing = body.max_tokens == 0  # only the prompt is wanted back
        if self.nothing and not body.echo:
            raise ApiError("max_tokens is 0: without echo nothing would come back", param="max_tokens")
        check_logprobs(body.logprobs, service.settings, param="logprobs")
        self.usage, self.always = usage_wanted(body)

    async def requests(self, name: str) -> list[Request]:
        """What the engine is asked: one request for each prompt."""
        body, service = self.body, self.service
        self.id = f"cmpl-{name}-{service.number()}"
        constraint = await constraint_of(body.response_format, service)
        wanted = max(1, body.max_tokens) if body.max_tokens is not None else None
        made = []
        for index, prompt in enumerate(self.prompts):
            most = room(prompt, wanted, service, param="prompt", wanted_by="max_tokens", default=DEFAULT_TOKENS)
            made.append(
                Request(
                    id=f"{self.id}-{index}",
                    prompt=prompt,
                    params=sampling_params(body, service, max_tokens=most, constrained=constraint is not None),
                    **beams(body, self.n, self.best_of),
                    logprobs=body.logprobs,
                    prompt_logprobs=body.logprobs if body.echo else None,
                    priority=body.priority or 0,
                    salt=body.cache_salt or "",
                    timeout=service.settings.request_timeout,
                    constraint=None if constraint is None else constraint.fork(),
                    skip_special_tokens=body.skip_special_tokens is not False,
                )
            )
        return made

    def take(self, which: int, piece: RequestOutput) -> dict[str, Any]:
        """Add a piece to its choice; what is new, as the choice of a chunk."""
        index = which * self.n + piece.index
        choice = self.choices[index]
        text, tokens = piece.text, list[TokenLogprob | None](piece.logprobs or ())
        if self.nothing:
            text, tokens = "", []
        if self.body.echo:
            if piece.prompt_logprobs is not None:
                self._prompt_logprobs(which, piece)
            if not choice.begun:
                text = self._prompt_text(which) + text
                tokens = [*self._scored.get(which, ()), *tokens]
        choice.begun = True
        told: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": piece.finish_reason}
        if self.nothing and piece.finish_reason is not None:
            told["finish_reason"] = "length"
        if self.body.logprobs is not None and tokens:
            texts = [self._text_of(which, place, token) for place, token in enumerate(tokens)]
            told["logprobs"] = completion_logprobs(tokens, texts=texts, offset=choice.offset)
            choice.offset += sum(map(len, texts))
        if not self.body.stream:
            choice.text += text
            choice.tokens += tokens
        choice.finish_reason = told["finish_reason"]
        if isinstance(piece.stop_reason, (str, int)):
            told["stop_reason"] = piece.stop_reason
        return told

    async def chunks(self, first: tuple[int, RequestOutput], run: RequestRun) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        told = self.take(*first)
        while True:
            chunk = self._envelope([told])
            if self.usage or self.always:
                chunk["usage"] = run.usage() if self.always else None
            yield chunk
            try:
                told = self.take(*await anext(run))
            except StopAsyncIteration:
                break
        if self.usage:
            yield self._envelope([]) | {"usage": run.usage()}

    def whole(self, run: RequestRun) -> dict[str, Any]:
        """The whole response."""
        told = []
        for index, choice in enumerate(self.choices):
            entry: dict[str, Any] = {"index": index, "text": choice.text, "logprobs": None}
            if self.body.logprobs is not None:
                which = index // self.n
                texts = [self._text_of(which, place, token) for place, token in enumerate(choice.tokens)]
                entry["logprobs"] = completion_logprobs(choice.tokens, texts=texts, offset=0)
            told.append(entry | {"finish_reason": choice.finish_reason})
        return self._envelope(told) | {"usage": run.usage()}

    def _prompt_logprobs(self, which: int, piece: RequestOutput) -> None:
        self._scored[which] = piece.prompt_logprobs or ()

    def _prompt_text(self, which: int) -> str:
        given: Any = self.body.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[which], str):
            return str(given[which])
        return self.service.tokenizer.decode(self.prompts[which]) if self.service.has_tokenizer else ""

    def _text_of(self, which: int, place: int, token: TokenLogprob | None) -> str:
        if token is not None:
            return token.text
        return self.service.tokenizer.decode([self.prompts[which][place]], skip_special_tokens=False)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }
