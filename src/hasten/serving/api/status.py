"""/health, /ready, /metrics and /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from hasten.serving.api.documentation import ERRORS, Model, Models, Status
from hasten.serving.api.responses import overloaded, reply
from hasten.serving.api.service import Service

UNWELL: dict[int | str, dict[str, Any]] = {503: ERRORS[503]}


def add_status(router: APIRouter, service: Service) -> None:

    @router.get("/health", response_model=Status, responses=UNWELL)
    async def health() -> Response:
        """Whether the engine works."""
        if not service.engine.healthy:
            raise overloaded("the engine has failed", seconds=30)
        return reply({"status": "ok"})

    @router.get("/ready", response_model=Status, responses=UNWELL)
    async def ready() -> Response:
        """Whether requests are taken now: the model is loaded, the engine works, no shutdown has begun."""
        if not service.ready or service.draining or not service.engine.healthy:
            raise overloaded("not ready", seconds=5)
        return reply({"status": "ready"})

    @router.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        response_class=Response,
    )
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/models", response_model=Models)
    async def models() -> Response:
        """The served model."""
        return reply({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{model:path}", response_model=Model, responses={404: ERRORS[404]})
    async def model(model: str) -> Response:
        """The served model, by its exact name."""
        service.check_model(model)
        return reply(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "hasten",
        "max_model_len": service.max_length,
        "vocab_size": service.vocabulary,
    }
