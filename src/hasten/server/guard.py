"""Middleware before every endpoint: limits, keys, request ids, one log line, and aborting for a client that is gone.

Plain ASGI. The body is read here, whole and within limits of size and time, and parsed within limits of its own. After
it only a disconnect can arrive: then the endpoint is cancelled, and the work that it started is aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hasten.server.errors import ANTHROPIC, ApiError, ClientGone, overloaded
from hasten.server.logs import LOGGER
from hasten.server.service import Service

PAGE = ("/page/app.css", "/page/app.js")  # and "/": files that hold nothing of this server
OPEN = ("/", "/health", "/ping", "/ready", "/v1/health", *PAGE)  # without a key
WATCHED = (*OPEN, "/metrics")  # also answered under load and while the server drains
_LOG = logging.getLogger(LOGGER)
NESTING, KEYS = 64, 4096  # maximum levels of a body, and keys of an object in it
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """The middleware. `service.settings` holds the limits."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.settings.api_keys]
        self._requests = 0
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        else:
            await send({"type": "websocket.close", "code": 1003})

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError for a request that is not allowed (host, key, size, load)."""
        settings, path = self.service.settings, scope["path"]
        # uvicorn limits incomplete headers only; those that arrive in one piece are counted here.
        size = len(scope.get("raw_path") or path.encode()) + len(scope.get("query_string", b""))
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > settings.header_bytes:
            message = f"the request's line and headers have {size:,} bytes; at most {settings.header_bytes:,}"
            raise ApiError(message, status=431, code="headers_too_large")
        if settings.allowed_hosts and "*" not in settings.allowed_hosts:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name.lower() not in settings.allowed_hosts:
                message = f"the Host header names {name[:100]!r}; allow it with --allowed-host"
                raise ApiError(message, status=403, code="host_not_allowed")
        if path in OPEN:
            return
        if self._keys and not self._knows(headers):
            message = "give a key of this server: Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if path in WATCHED:
            return
        if self._requests > settings.requests:
            raise overloaded(f"{settings.requests} requests are already in flight")
        if self.service.draining:
            raise overloaded("the server is shutting down", seconds=5)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        """Compare with every key by hashes of the same length, so that the time reveals nothing about a key."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # Anthropic's clients
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return any(matches)


class _Exchange:
    """One request and its response."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard, self.scope, self.receive, self._send = guard, scope, receive, send
        self.headers = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if _GOOD_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.facts: dict[str, object] = {}
        self.cleanup: list[Callable[[], Awaitable[None]]] = []  # generators of the endpoint, closed in any case
        self.arrived = time.perf_counter()
        state = scope.setdefault("state", {})
        state.update(request_id=self.id, arrived=self.arrived, facts=self.facts, cleanup=self.cleanup)
        self.status: int | None = None
        self.held = 0
        self.counted = False
        self.ended = False

    async def run(self) -> None:
        guard = self.guard
        guard._requests += 1
        outcome = "ok"
        try:
            guard.check(self.scope, self.headers)
            if self.scope["path"] not in WATCHED:
                guard.service.in_flight += 1
                self.counted = True
            body = await self._read_body()
            await self._run_until_gone(body)
        except ApiError as error:
            await self._answer(error)
        except ClientGone:
            outcome = "client gone"
            drop: Callable[[], None] | None = self.scope.get("state", {}).get("drop")
            if drop is not None and not self.ended:
                drop()
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = "failed"
            _LOG.error("failed", exc_info=error, extra={"fields": {"request_id": self.id}})
            await self._answer(ApiError("the server failed at this request", status=500, code="internal_error"))
        finally:
            guard._requests -= 1
            guard.service.in_flight -= self.counted
            guard._bytes -= self.held
            path = getattr(self.scope.get("route"), "path", "unknown")
            guard.service.metrics.responses.labels(path, str(self.status or 499)).inc()
            fields = {"request_id": self.id, "method": self.scope["method"], "path": self.scope["path"][:200]}
            fields |= {"status": self.status or 499, "seconds": round(time.perf_counter() - self.arrived, 4)}
            level = logging.DEBUG if self.scope["path"] in WATCHED else logging.INFO
            _LOG.log(level, "request", extra={"fields": fields | {"outcome": outcome, **self.facts}})

    async def _read_body(self) -> bytes:
        """Read the whole body within the limits. GET and HEAD have none."""
        settings, guard = self.guard.service.settings, self.guard
        most = settings.body_bytes
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise ApiError(f"the body has {length[:24].decode()} bytes; at most {most:,}", status=413, code="too_large")
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(settings.body_timeout):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    self.held += len(chunk)
                    guard._bytes += len(chunk)
                    if self.held > most:
                        raise ApiError(f"the body has more than {most:,} bytes", status=413, code="too_large")
                    if guard._bytes > settings.bodies_bytes:
                        raise overloaded("the requests in flight hold too much memory")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            message_ = f"the body did not arrive within {settings.body_timeout:g} s"
            raise ApiError(message_, status=408, code="timeout") from None
        body = b"".join(chunks)
        if body and self.scope["method"] == "POST":
            kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":  # types that web pages may send to other hosts
                raise ApiError("the Content-Type must be application/json", status=415, code="content_type")
        return body

    async def _run_until_gone(self, body: bytes) -> None:
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # the watcher below reports the disconnect
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        work = asyncio.ensure_future(self.guard.app(self.scope, replay, self.send))
        watch = asyncio.create_task(self._gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            await work
        finally:
            for task in (work, watch):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task
            for end in self.cleanup:
                # A generator that still runs (if we were cancelled while waiting for the work above) cannot be closed:
                # its own cancellation ends it. The others must be closed too.
                with suppress(RuntimeError):
                    await end()

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """Send to the client, within the write timeout, with the request's id among the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [(b"x-request-id", self.id.encode()), (b"x-content-type-options", b"nosniff")]
            if self.scope["path"].startswith(ANTHROPIC):
                extra.append((b"request-id", self.id.encode()))
            if ignored := self.facts.get("ignored"):
                extra.append((b"x-hasten-ignored", str(ignored).encode()))
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        try:
            async with asyncio.timeout(self.guard.service.settings.write_timeout):
                await self._send(message)
        except OSError:  # TimeoutError is one
            raise ClientGone from None
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.ended = True

    async def _answer(self, error: ApiError) -> None:
        """Send the error, unless a response has already started."""
        if self.status is not None:
            return
        response = error.response(self.scope["path"], self.id)
        if error.status in (408, 413, 431):  # the rest of the body is not read
            response.headers["Connection"] = "close"
        with suppress(ClientGone):
            await response(self.scope, self.receive, self.send)


class BodyRoute(APIRoute):
    """A route whose JSON body is parsed by `parse_json` instead of Python's parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_parsed(request: Request) -> Response:
            parsed = _ParsedRequest(request.scope, request.receive)
            if body := await parsed.body():
                parsed.value = parse_json(body)
            return await handle(parsed)

        return handle_parsed


class _ParsedRequest(Request):
    value: Any = None

    async def json(self) -> Any:
        return self.value


def parse_json(data: bytes) -> Any:
    """Parse JSON; raises ApiError (400) if it is invalid, nested too deeply, or an object has too many keys.

    NaN, infinity, numbers of more than 4,300 digits, lone surrogates and invalid UTF-8 are refused (RFC 8259). Python's
    own parser accepts the first and the third, and recurses as deeply as the input nests.
    """
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        code = "nesting" if "recursion" in str(error) else "invalid_json"
        raise ApiError(f"the body is not valid JSON: {error}", code=code) from None
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level:
        if any(len(item) > KEYS for item in level if isinstance(item, dict)):
            raise ApiError(f"an object in the body has more than {KEYS:,} keys", code="too_many_keys")
        inner = [items.values() if isinstance(items, dict) else items for items in level]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        depth += 1
        if depth > NESTING and level:
            raise ApiError(f"the body is nested deeper than {NESTING} levels", code="nesting")
    return value
