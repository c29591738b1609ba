"""The ASGI app: OpenAI's API, documented by /openapi.json, every endpoint behind the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from hasten import __version__
from hasten.serving.api.chat import chat_router
from hasten.serving.api.completions import completions_router
from hasten.serving.api.embeddings import embeddings_router
from hasten.serving.api.errors import ApiError, from_validation
from hasten.serving.api.guard import Guard
from hasten.serving.api.service import ServedEngine, Service
from hasten.serving.api.settings import ServerSettings
from hasten.serving.api.status import status_router
from hasten.serving.api.tokens import tokens_router

if TYPE_CHECKING:
    from hasten.model.tokenizer import Tokenizer


def make_app(
    engine: ServedEngine,
    model_name: str,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    *,
    max_length: int,
    vocabulary: int,
    eos_ids: Collection[int],
) -> FastAPI:
    """The app that serves one engine under one model name. `app.state.service` is what its endpoints share.

    max_length: tokens of prompt and answer together. vocabulary: the number of logits. eos_ids: tokens
    that end a text. When the app's lifespan ends, the engine is closed; whoever serves the app waits before for what is
    in flight (`Service.drain`, as `Server` does).
    """
    service = Service(
        engine,
        model_name=model_name,
        tokenizer=tokenizer,
        settings=settings,
        max_length=max_length,
        vocabulary=vocabulary,
        eos_ids=eos_ids,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.ready = True
        yield
        service.ready = False
        service.draining = True
        await engine.close()
        service.close()

    # Its pages of documentation would fetch scripts from elsewhere; the description itself is at /openapi.json.
    app = FastAPI(title="hasten", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Guard, service=service)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    makers = (status_router, completions_router, chat_router, embeddings_router, tokens_router)
    for make in makers:
        app.include_router(make(service))
    return app


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"there is nothing at {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
    text = message.get(error.status_code, str(error.detail))
    return ApiError(text, status=error.status_code, headers=error.headers or {}).response()
