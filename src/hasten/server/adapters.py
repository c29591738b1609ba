"""/v1/load_lora_adapter and /v1/unload_lora_adapter, vLLM's: adapters of the model change while it is served.

A client names a folder of this machine, so the operator names the one below which it must be (`--adapter-folder`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from hasten.checkpoints.adapter_files import CONFIG, WEIGHTS
from hasten.errors import HastenError, ResourceError
from hasten.server.answers import reply
from hasten.server.bodies import Name, Neutral, RequestBody
from hasten.server.documentation import ERRORS, Status
from hasten.server.errors import ApiError, from_library
from hasten.server.service import Service


class LoadAdapterBody(RequestBody):
    """The adapter's name in requests, and its folder: below the operator's, or relative to it."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    neutral: ClassVar[Neutral] = {"load_inplace": (False,)}


class UnloadAdapterBody(RequestBody):
    """The adapter's name."""

    lora_name: Name
    bookkeeping = RequestBody.bookkeeping | {"lora_int_id"}


def add_adapters(router: APIRouter, service: Service) -> None:

    @router.post("/v1/load_lora_adapter", response_model=Status, responses=ERRORS)
    async def load(body: LoadAdapterBody, http: HttpRequest) -> Response:
        """Load a LoRA adapter, which requests then choose by its name in `model`."""
        service.note_ignored(body, http)
        folder = await service.in_thread(partial(folder_below, service.settings.adapter_folder, body.lora_path))
        name = body.lora_name
        taken = {tag for model in service.models for tag in (model, f"{model}:latest")}
        if {name, f"{name}:latest"} & taken or not name.isprintable() or not name.strip():
            raise ApiError(f"lora_name: {name!r} is in use, or cannot be printed", param="lora_name")
        # As one task: if the client goes, the engine and the list of models still agree.
        await asyncio.shield(asyncio.ensure_future(_load(service, name, folder, called=body.lora_path)))
        return reply({"status": "ok"})

    @router.post("/v1/unload_lora_adapter", response_model=Status, responses=ERRORS)
    async def unload(body: UnloadAdapterBody, http: HttpRequest) -> Response:
        """Take an adapter away. Requests that run with it go on."""
        service.note_ignored(body, http)
        _check_allowed(service.settings.adapter_folder)
        name = body.lora_name
        if name not in service.models or name == service.model_name:
            raise ApiError(f"lora_name: there is no adapter {name!r} here", status=404, param="lora_name")
        await asyncio.shield(asyncio.ensure_future(_unload(service, name)))
        return reply({"status": "ok"})


def folder_below(root: Path | None, path: str) -> Path:
    """The folder that a client names, symlinks followed. Raises ApiError unless it and its files are below `root`."""
    base = _check_allowed(root).expanduser().resolve()
    try:
        folder = (base / path).resolve()
        folder.is_dir()  # fails where the name is too long
        inside = all(one.resolve().is_relative_to(base) for one in (folder, folder / CONFIG, folder / WEIGHTS))
    except (OSError, RuntimeError, ValueError):  # also a loop of links, and what is no path at all
        inside = False
    if not inside:
        message = f"lora_path: {path[:200]!r} is not below the folder that this server loads adapters from"
        raise ApiError(message, param="lora_path")
    return folder


def _check_allowed(root: Path | None) -> Path:
    if root is None:
        message = "adapters stay as they are; a server with --adapter-folder DIR loads and unloads those below DIR"
        raise ApiError(message, status=403, code="not_allowed")
    return root


async def _load(service: Service, name: str, folder: Path, *, called: str) -> None:
    """Load it; errors name the folder as the client `called` it, and not where it is on this machine."""
    try:
        await service.engine.load_adapter(name, folder)
    except HastenError as error:
        memory = isinstance(error, ResourceError)
        refused = ApiError(str(error), status=503, code="out_of_memory") if memory else from_library(error)
        refused.message = refused.message.replace(str(folder), called)
        raise refused from None
    service.models.append(name)


async def _unload(service: Service, name: str) -> None:
    try:
        await service.engine.unload_adapter(name)
    except HastenError as error:
        raise from_library(error) from None
    service.models.remove(name)
