"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from hasten.server.answers import reply
from hasten.server.bodies import Messages, Neutral, RequestBody, TemplateBody, Text, TokenId, ToolList
from hasten.server.build_request import encode_conversation
from hasten.server.documentation import ERRORS, Detokenized, Tokens
from hasten.server.errors import ApiError
from hasten.server.service import Service


class TokenizeBody(TemplateBody):
    """A text, or a conversation. return_token_strs: the tokens' own texts too."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    neutral: ClassVar[Neutral] = {"chat_template": ()}


class DetokenizeBody(RequestBody):
    """Token ids."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 18, fail_fast=True)]


def add_tokens(router: APIRouter, service: Service) -> None:

    @router.post("/tokenize", response_model=Tokens, responses=ERRORS)
    async def tokenize(body: TokenizeBody, http: HttpRequest) -> Response:
        """Token ids of a text or a conversation."""
        service.note_ignored(body, http)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give one of prompt and messages", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await service.encode(body.prompt, add_special_tokens=special)
        else:
            ids = await encode_conversation(
                body.messages or [],
                body,
                service,
                tools=[tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None,
                add_special_tokens=body.add_special_tokens is True,
            )
        texts = [service.tokenizer.backend.id_to_token(i) or "" for i in ids] if body.return_token_strs else None
        facts = {"count": len(ids), "max_model_len": service.max_length}
        return reply(facts | {"tokens": ids, "token_strs": texts})

    @router.post("/detokenize", response_model=Detokenized, responses=ERRORS)
    async def detokenize(body: DetokenizeBody, http: HttpRequest) -> Response:
        """The text of token ids, special ones included."""
        service.note_ignored(body, http)
        service.check_model(body.model)
        tokenizer = service.tokenizer
        ids = body.tokens
        if max(ids, default=0) >= service.vocabulary:
            raise ApiError(f"tokens: the vocabulary has {service.vocabulary}", param="tokens")
        text = await service.in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return reply({"prompt": text})
