"""Run the app: bind the socket first, limit uvicorn's connections, shut down in order."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hasten.errors import ConfigError
from hasten.machine.signals import capture_signals
from hasten.server.settings import ServerSettings

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from hasten.server.service import Service

CONNECTIONS = 8192
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 lets the system choose one. Raises ConfigError if it cannot be bound."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is not between 0 and 65535")
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host, --port"
        ) from None
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_of(sock: socket.socket, host: str) -> str:
    """URL of the server; the loopback address if it listens on all interfaces."""
    port = sock.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server that drains before it closes: the second signal ends it at once.

    While it drains it still listens, so that /ready says 503 to a load balancer, /metrics can be read, and new requests
    are refused with an error; those in flight have `settings.drain_timeout` seconds, then they are aborted.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, *, listening: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=settings.header_bytes,
            timeout_graceful_shutdown=1,  # requests have finished: only last bytes are left
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._settings, self._listening = settings, listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._listening is not None:
            self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        in_time = await self._service.drain(self._settings.drain_timeout, given_up=lambda: self.force_exit)
        if not in_time and not self.force_exit:
            await self._service.engine.close()  # aborts the rest, which get an error that says why
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Handle signals as we do, not as uvicorn, which raises them again: a drained server exits with status 0."""
        return capture_signals(self.handle_exit)

    def run_on(self, sock: socket.socket) -> None:
        """Serve until a signal (or `should_exit`) ends it."""
        asyncio.run(self.serve(sockets=[sock]))


class _Protocol(H11Protocol):
    """One connection, with a time limit for headers; a client that reads nothing can be dropped at once."""

    header_timeout = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "drop": transport.abort}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        waiting = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        if not waiting:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def curl_line(url: str, model_name: str, *, key: bool, has_tokenizer: bool) -> str:
    """A curl command that works unchanged once the server listens."""
    import json
    import shlex

    prompt: Any = "Once upon a time" if has_tokenizer else [1, 2, 3]
    body: dict[str, Any] = {"model": model_name, "prompt": prompt, "max_tokens": 32}
    secret = ' -H "Authorization: Bearer $HASTEN_API_KEY"' if key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{secret} -d {data}"
