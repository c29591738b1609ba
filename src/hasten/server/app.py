"""The ASGI app: OpenAI's, Anthropic's and Ollama's APIs, described by /openapi.json, all behind the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from hasten import __version__
from hasten.server.adapters import add_adapters
from hasten.server.answers import reply
from hasten.server.chat import add_chat
from hasten.server.completions import add_completions
from hasten.server.documentation import ERRORS, Model, Models, Status, Version
from hasten.server.embeddings import add_embeddings
from hasten.server.errors import ApiError, from_validation, overloaded
from hasten.server.guard import BodyRoute, Guard
from hasten.server.live import add_live
from hasten.server.messages import add_messages
from hasten.server.ollama import add_ollama
from hasten.server.ollama_models import add_ollama_models
from hasten.server.page import add_page
from hasten.server.rerank import add_rerank
from hasten.server.responses import add_responses
from hasten.server.service import Service
from hasten.server.tokens import add_tokens


def make_app(service: Service) -> FastAPI:
    """Build the app that serves one engine under one model name. `app.state.service` is shared by its endpoints.

    The engine is closed when the app's lifespan ends; before that, whoever runs the app should wait for requests in
    flight (`Service.drain`, as `Server` does).
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.ready = True
        yield
        service.ready = False
        service.draining = True
        await service.engine.close()
        service.close()

    # FastAPI's documentation pages would load scripts from other hosts; the description is at /openapi.json.
    app = FastAPI(title="hasten", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Guard, service=service)
    if origins := service.settings.allowed_origins:  # outside the guard, so that pages can read its errors too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.lower() for origin in origins],
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,  # public pages may call a server on this machine
            expose_headers=("x-request-id", "request-id", "x-hasten-ignored", "retry-after"),
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response(request.url.path, request.state.request_id)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path, request.state.request_id)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = {404: f"there is nothing at {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        text = message.get(error.status_code, str(error.detail))
        found = ApiError(text, status=error.status_code, headers=error.headers or {})
        return found.response(request.url.path, request.state.request_id)

    router = APIRouter(route_class=BodyRoute)
    own = (_add_status, add_page, add_live, add_tokens, add_adapters)
    openai = (add_completions, add_chat, add_responses, add_embeddings, add_rerank)
    for add in (*own, *openai, add_messages, add_ollama, add_ollama_models):
        add(router, service)
    app.include_router(router)
    return app


UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: ERRORS[503]}


def _add_status(router: APIRouter, service: Service) -> None:

    @router.get("/ping", response_model=Status, responses=UNAVAILABLE)
    @router.get("/v1/health", response_model=Status, responses=UNAVAILABLE)
    @router.get("/health", response_model=Status, responses=UNAVAILABLE)
    async def health() -> Response:
        """Report whether the engine works."""
        if not service.engine.healthy:
            raise overloaded("the engine has failed", seconds=30)
        return reply({"status": "ok"})

    @router.get("/version", response_model=Version)
    async def version() -> Response:
        """The version of hasten."""
        return reply({"version": __version__})

    @router.get("/ready", response_model=Status, responses=UNAVAILABLE)
    async def ready() -> Response:
        """Report whether requests are accepted: the model is loaded, the engine works, and no shutdown has begun."""
        if not service.ready or service.draining or not service.engine.healthy:
            raise overloaded("not ready", seconds=5)
        return reply({"status": "ready"})

    @router.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        response_class=Response,
    )
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/models", response_model=Models)
    async def models() -> Response:
        """The served model, and its adapters."""
        found = [_model(service, name) for name in service.models]
        pages = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}  # Anthropic's clients
        return reply({"object": "list", "data": found} | pages)

    @router.get("/v1/models/{model:path}", response_model=Model, responses={404: ERRORS[404]})
    async def model(model: str) -> Response:
        """The served model or one of its adapters, by its name."""
        return reply(_model(service, service.check_model(model) or service.model_name))


def _model(service: Service, name: str) -> dict[str, Any]:
    parent = {} if name == service.model_name else {"parent": service.model_name}
    return parent | {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "owned_by": "hasten",
        "max_model_len": service.max_length,
        "vocab_size": service.vocabulary,
    }
