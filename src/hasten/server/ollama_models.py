"""Ollama's descriptions of the served model: /api/version, /api/tags, /api/show."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from hasten import __version__
from hasten.engine.params import RECOMMENDED
from hasten.server.answers import Json, reply
from hasten.server.bodies import RequestBody
from hasten.server.documentation import OLLAMA_ERRORS, OllamaModels, OllamaShown, OllamaVersion
from hasten.server.ollama import abilities
from hasten.server.service import Service

VERSION = "0.12.11"  # of Ollama, whose API this is: clients compare it with the one that they need


class ShowBody(RequestBody):
    """The model's name."""

    model: Annotated[str, Field(max_length=512)]
    bookkeeping = RequestBody.bookkeeping | {"verbose"}


def add_ollama_models(router: APIRouter, service: Service) -> None:

    @router.get("/api/version", response_model=OllamaVersion)
    async def version() -> Response:
        """The version of Ollama's API that is followed, and that of hasten."""
        return reply({"version": VERSION, "hasten": __version__})

    @router.get("/api/tags", response_model=OllamaModels)
    async def tags() -> Response:
        """The served model and its adapters, in Ollama's form."""
        return reply({"models": [_listed(service, name) for name in service.models]})

    @router.post("/api/show", response_model=OllamaShown, responses=OLLAMA_ERRORS)
    async def show(body: ShowBody, http: HttpRequest) -> Response:
        """What the served model is and can do, in Ollama's form."""
        service.note_ignored(body, http)
        name = service.check_model(body.model) or service.model_name
        templates = service.tokenizer.templates if service.has_tokenizer else {}
        defaults = service.settings.defaults
        names = {"repetition_penalty": "repeat_penalty"}
        known = [(names.get(one, one), defaults[one]) for one in RECOMMENDED if defaults.get(one) is not None]
        return reply(
            {
                "modelfile": f"FROM {name}\n",
                "parameters": "\n".join(f"{option} {value}" for option, value in known),
                "template": templates["default"].source if "default" in templates else "{{ .Prompt }}",
                "details": _details(service, name),
                "model_info": _facts(service),
                "capabilities": await abilities(service),
                "modified_at": _date(service),
            }
        )


def _listed(service: Service, name: str) -> Json:
    """A model in the list, under its name with a tag."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    entry = {"name": tagged, "model": tagged, "modified_at": _date(service), "size": service.facts.bytes}
    entry |= {"details": _details(service, name)}
    # Clients show its beginning. It identifies what is listed here, not the bytes of the weights.
    digest = hashlib.sha256(json.dumps([name, _facts(service), service.facts.bytes]).encode()).hexdigest()
    return entry | {"digest": digest}


def _details(service: Service, name: str) -> Json:
    family, count = service.facts.family, service.facts.parameters
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    parent = "" if name == service.model_name else service.model_name
    return {"parent_model": parent, "family": family, "families": [family], "parameter_size": size}


def _facts(service: Service) -> dict[str, Any]:
    """Facts under the names that Ollama takes from GGUF files."""
    family = service.facts.family
    return {
        "general.architecture": family,
        "general.parameter_count": service.facts.parameters,
        f"{family}.context_length": service.max_length,
        f"{family}.vocab_size": service.vocabulary,
    }


def _date(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat()
