"""The page at `/`: three static files of the package, served to browsers without a key.

They hold nothing of this server. What the page shows, it asks of the API, with a key where the server has keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from hasten.server.answers import reply
from hasten.server.documentation import Status
from hasten.server.service import Service

FOLDER = Path(__file__).parent
KINDS = {"index.html": "text/html", "app.js": "text/javascript", "app.css": "text/css"}
# Nothing from other hosts, no inline script or style, and no other page may frame this one. data: is the page's icon.
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class PageFile:
    """One file of the page, with its headers. The response to a browser that has it already is a 304."""

    def __init__(self, name: str) -> None:
        self._content = (FOLDER / name).read_bytes()
        self._kind = f"{KINDS[name]}; charset=utf-8"
        self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'

    def response(self, http: HttpRequest) -> Response:
        """The file, or a 304 where If-None-Match names it."""
        headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": POLICY,
            "Cross-Origin-Opener-Policy": "same-origin",
            "ETag": self._tag,
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept",
        }
        known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
        if self._tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._kind, headers=headers)


def add_page(router: APIRouter, service: Service) -> None:
    files = {name: PageFile(name) for name in KINDS} if service.settings.page else {}

    @router.head("/", include_in_schema=False)
    @router.get("/", response_model=Status)
    async def root(http: HttpRequest) -> Response:
        """Report that a server listens; clients ask before their first request. Browsers get the page."""
        if files and http.method == "GET" and "text/html" in http.headers.get("accept", ""):
            return files["index.html"].response(http)
        status = reply({"status": "ok"})
        status.headers["Vary"] = "Accept"
        return status

    def served(file: PageFile) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        async def asset(http: HttpRequest) -> Response:
            return file.response(http)

        return asset

    for name in files.keys() - {"index.html"}:
        router.add_api_route(f"/page/{name}", served(files[name]), include_in_schema=False)
