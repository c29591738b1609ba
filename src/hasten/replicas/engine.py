"""The engine that the HTTP API calls when there are replicas: routes each request, and retries if its replica dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hasten.engine.prefixes import prefix_keys
from hasten.engine.request import EngineFailed, Request, RequestOutput
from hasten.engine.settings import ModelFacts, Stats
from hasten.errors import ConfigError
from hasten.replicas.replica import Answer, packed
from hasten.replicas.routing import KEY_BYTES, Ask, Board

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")

RETRIES = 3  # of a request whose replicas died: it might be what kills them
PATIENCE = 60.0  # seconds that a request waits where there is no replica
_ADAPTERS = "replicas have the adapters that they began with; name all of them with --adapter NAME=FOLDER"


class ReplicaDied(Exception):
    """The replica, or the connection to it, was lost."""


class Channel(Protocol):
    """Connection to the replicas. `board.rank(ask)` decides where a request goes; `board.sent` records it."""

    def generate(self, ask: Ask, request: Request) -> AsyncGenerator[Answer]:
        """Send a request; closing the generator aborts it. Raises ReplicaDied."""

    async def embed(self, ask: Ask, prompts: Sequence[Sequence[int]], how: dict[str, Any]) -> Any:
        """Compute embeddings on a replica. Raises ReplicaDied."""

    async def close(self) -> None: ...


class ReplicatedEngine:
    """The methods of `hasten.engine.async_engine.AsyncEngine`, over replicas."""

    def __init__(self, channel: Channel, board: Board, facts: ModelFacts, *, block_size: int, secret: bytes) -> None:
        self.facts, self.board = facts, board
        self._channel, self._block_size, self._secret = channel, block_size, secret
        self._closed = False
        self._seen = time.monotonic()  # when there was a replica last
        self.retried = 0

    @property
    def healthy(self) -> bool:
        return self.error is None

    @property
    def error(self) -> str | None:
        """Why the engine is not healthy, or None."""
        if self._closed:
            return "the server was closed"
        if self.board.states:
            self._seen = time.monotonic()
            return None
        away = time.monotonic() - self._seen
        return f"no replica has been there for {away:.0f} s" if away > PATIENCE else None

    def replica_stats(self) -> dict[str, Stats]:
        """Statistics by replica name, as last reported."""
        states = self.board.states.items()
        return {name: state.report["stats"] for name, state in states if state.report is not None}

    async def generate(self, *requests: Request) -> AsyncGenerator[RequestOutput]:
        """`AsyncEngine.generate` over the replicas; requests given together may wait in different queues.

        If a replica dies, a request of which nothing was given out restarts on another one; others raise EngineFailed.
        """
        if len(requests) == 1:
            async with aclosing(self._one(requests[0])) as outputs:
                async for output in outputs:
                    yield output
            return
        queue: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue(maxsize=len(requests))

        async def read(request: Request) -> None:
            try:
                async with aclosing(self._one(request)) as outputs:
                    async for output in outputs:
                        await queue.put(output)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        readers = [asyncio.create_task(read(request)) for request in requests]
        left = len(readers)
        try:
            while left:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pooling: str = "mean",
        adapter: str = "",
        timeout: float | None = None,
    ) -> Tensor:
        """`AsyncEngine.embed` on one of the replicas; retried on another one if it dies."""
        how = {"pooling": pooling, "adapter": adapter, "timeout": timeout}
        for _ in range(RETRIES + 1):
            ask = Ask(sum(map(len, prompts)))
            try:
                found = await self._patiently(self._channel.embed(ask, prompts, how))
            except ReplicaDied:
                self.retried += 1
                continue
            finally:
                self.board.ended(ask)
            if isinstance(found, Exception):
                raise found
            return found
        raise self._given_up("embeddings")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Raises ConfigError: replicas have the adapters that they began with."""
        raise ConfigError(_ADAPTERS)

    async def unload_adapter(self, name: str) -> None:
        """Raises ConfigError: replicas have the adapters that they began with."""
        raise ConfigError(_ADAPTERS)

    def watch(self) -> None:
        """Return None: the blocks are in other processes."""

    async def close(self) -> None:
        """Stop the replicas."""
        self._closed = True
        await self._channel.close()

    async def _one(self, request: Request) -> AsyncGenerator[RequestOutput]:
        for attempt in range(RETRIES + 1):
            # With an id of its own: the replica may be the same one, which has not heard yet that it was given up.
            sent = packed(replace(request, id=f"{request.id}#{attempt}"))
            ask = self._ask(request)
            given, finished = 0, False
            try:
                async with aclosing(self._channel.generate(ask, sent)) as answers:
                    async for found in self._from_first(answers):
                        self.board.begun(ask)
                        if isinstance(found, Exception):
                            raise found
                        for output in found:
                            given, finished = given + 1, output.finished
                            yield replace(output, request_id=request.id)
                if not finished:
                    raise ReplicaDied("it ended without an end of the answer")
                return
            except ReplicaDied as error:
                if given:
                    raise EngineFailed(f"the replica that answered has died; the answer ends here ({error})") from None
                self.retried += 1
            finally:
                self.board.ended(ask)
        raise self._given_up(request.id)

    def _ask(self, request: Request) -> Ask:
        """Describe a request to the router, with the keys of prefix blocks (at least one token is left to compute)."""
        if request.sharing is None:
            return Ask(len(request.prompt))
        tokens, size = request.prompt[:-1], self._block_size
        keys = prefix_keys(tokens, block_size=size, secret=self._secret, salt=request.sharing)
        return Ask(len(request.prompt), [key[:KEY_BYTES] for key in islice(keys, 1, None)], size)

    async def _from_first(self, answers: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
        """Yield the answers; the first is awaited with `_patiently`."""
        first = await self._patiently(anext(answers, None))
        if first is not None:
            yield first
        async for found in answers:
            yield found

    async def _patiently(self, result: Awaitable[Result]) -> Result:
        """Await something; raises EngineFailed if no replica has been available for too long."""
        waited = asyncio.ensure_future(result)
        try:
            while not (await asyncio.wait({waited}, timeout=1.0))[0]:
                if self.error is not None:
                    raise EngineFailed(self.error)
            return waited.result()
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)

    def _given_up(self, what: str) -> EngineFailed:
        return EngineFailed(f"{what}: {RETRIES + 1} replicas died of it, or with it; it is not tried again")
