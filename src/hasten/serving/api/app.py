"""The ASGI app: OpenAI's API, documented by /openapi.json, every endpoint behind the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from hasten import __version__
from hasten.serving.api.chat import add_chat
from hasten.serving.api.completions import add_completions
from hasten.serving.api.embeddings import add_embeddings
from hasten.serving.api.guard import Guard
from hasten.serving.api.responses import ApiError, from_validation
from hasten.serving.api.service import Service
from hasten.serving.api.status import add_status
from hasten.serving.api.tokens import add_tokens


def make_app(service: Service) -> FastAPI:
    """The app that serves one engine under one model name. `app.state.service` is what its endpoints share.

    When the app's lifespan ends, the engine is closed; whoever serves the app waits before for what is in flight
    (`Service.drain`, as `Server` does).
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.ready = True
        yield
        service.ready = False
        service.draining = True
        await service.engine.close()
        service.close()

    # Its pages of documentation would fetch scripts from elsewhere; the description itself is at /openapi.json.
    app = FastAPI(title="hasten", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Guard, service=service)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    router = APIRouter(route_class=_ParsedRoute)
    for add in (add_status, add_completions, add_chat, add_embeddings, add_tokens):
        add(router, service)
    app.include_router(router)
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


class _ParsedRequest(Request):
    async def json(self) -> Any:
        return self.state.json


class _ParsedRoute(APIRoute):
    """A route whose body is the value that stands in the request's state (the guard put it there)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed
