"""`GET /v1/hasten/live`: the engine as the page shows it, a few times a second, as server-sent events.

One task takes snapshots for all watchers. It begins with the first one and ends with the last, so that an engine that
nobody watches does nothing for it. Counts are those of /metrics.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from hasten.errors import HastenError
from hasten.server.answers import EventStream
from hasten.server.errors import from_library, overloaded
from hasten.server.metrics import median
from hasten.server.service import Service

if TYPE_CHECKING:
    from hasten.engine.watch import Snapshot, Watched, WatchedModel

Json = dict[str, Any]
EVERY = 0.25  # seconds between two events
WINDOW = 8  # intervals over which rates are taken
SHOWN = 64  # sequences of an event at most


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters at a time; of replicas their sums. tokens: of each sequence, by its number."""

    time: float
    steps: int
    generated: int
    computed: int
    drafted: int
    accepted: int
    tokens: dict[int, int]


class Live:
    """The events of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Json | Exception] | None = None
        self._facts: Json = {}  # of the first event
        self._history: deque[_Counts] = deque(maxlen=1 + WINDOW)

    async def events(self) -> AsyncGenerator[Json]:
        """Yield events until the server drains. Raises ApiError if the engine fails."""
        self._watchers += 1
        if self._next is None or self._task is None or self._task.done():
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._follow())
        first = True
        try:
            while not self._service.draining:
                event = await asyncio.shield(self._next)
                if isinstance(event, Exception):
                    raise event
                yield self._facts | event if first else event
                first = False
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._next = self._task = None

    async def _follow(self) -> None:
        """Publish an event every EVERY seconds, or why there are no more."""
        try:
            async with self._watched() as watched:
                model = None if watched is None else watched.model
                self._facts = self._model_facts(model)
                self._history.clear()
                while True:
                    self._publish(self._event(None if watched is None else await watched.look(), model))
                    await asyncio.sleep(EVERY)
        except Exception as error:  # nobody may wait for an event that does not come
            assert self._next is not None
            self._next.set_result(from_library(error) if isinstance(error, HastenError) else error)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[Watched | None]:
        """The engine, or None where its blocks cannot be seen."""
        watching = self._service.engine.watch()
        if watching is None:
            yield None
            return
        async with watching as watched:
            yield watched

    def _publish(self, event: Json) -> None:
        assert self._next is not None
        published, self._next = self._next, asyncio.get_running_loop().create_future()
        published.set_result(event)

    def _model_facts(self, model: WatchedModel | None) -> Json:
        from hasten.model.binding import grouped

        kernels = [] if model is None else grouped(model.kernels)
        return {
            "model": self._service.model_name,
            "machine": None if model is None else model.machine,
            "kernels": [
                {
                    "part": f"{binding.operator}, {layers}",
                    "kernel": binding.kernel,
                    "why": [{"kernel": other.kernel, "reason": other.reason} for other in binding.others],
                }
                for layers, binding in kernels
            ],
        }

    def _event(self, snapshot: Snapshot | None, model: WatchedModel | None) -> Json:
        stats, metrics = list(self._service.engine.replica_stats().values()), self._service.metrics
        sequences = [] if snapshot is None else snapshot.sequences

        def total(name: str) -> int:
            return sum(getattr(one, name) for one in stats)

        now = _Counts(
            time.monotonic(),
            total("steps"),
            total("generated_tokens"),
            total("computed_tokens"),
            total("draft_tokens"),
            total("accepted_tokens"),
            {one.number: one.tokens for one in sequences},
        )
        self._history.append(now)
        return {
            "t": time.time(),
            "blocks": None if snapshot is None else _blocks(snapshot),
            "sequences": [
                {"id": one.number, "colour": one.mark, "tokens": one.tokens, "computed": one.computed}
                | {"speed": self._speed(one.number)}
                for one in sequences[:SHOWN]
            ],
            "rates": self._rates(snapshot, None if model is None else model.bandwidth),
            "queue": {"running": total("running"), "waiting": total("waiting")},
            "latency": {"ttft_p50": median(metrics.first), "itl_p50": median(metrics.between)},
        }

    def _rates(self, snapshot: Snapshot | None, bandwidth: float | None) -> Json:
        """Tokens a second, and shares (or None): of the bandwidth, and of drafted tokens that were taken."""
        old, new = self._history[0], self._history[-1]
        seconds = new.time - old.time
        if seconds <= 0:
            return {"prompt": 0.0, "generation": 0.0, "mbu": None, "accepted": None}
        generated, drafted = new.generated - old.generated, new.drafted - old.drafted
        accepted = new.accepted - old.accepted
        # A decode step computes a token for each that it adds, and its drafts; the others were of prompts.
        read = new.computed - old.computed - (generated - accepted + drafted)
        moved = (new.steps - old.steps) * (0.0 if snapshot is None else snapshot.step_bytes)
        return {
            "prompt": max(0, read) / seconds,
            "generation": generated / seconds,
            "mbu": moved / seconds / bandwidth if bandwidth and moved else None,
            "accepted": accepted / drafted if drafted else None,
        }

    def _speed(self, number: int) -> float:
        """Tokens a second of a sequence, since it was first seen within the window."""
        old, new = next(one for one in self._history if number in one.tokens), self._history[-1]
        seconds = new.time - old.time
        return (new.tokens[number] - old.tokens[number]) / seconds if seconds > 0 else 0.0


def _blocks(snapshot: Snapshot) -> Json:
    return {
        "size": snapshot.block_size,
        "total": snapshot.blocks,
        "free": snapshot.free,
        "map": b64encode(snapshot.marks).decode(),
        "shared": snapshot.shared,
        "copied": snapshot.copied,
    }


def add_live(router: APIRouter, service: Service) -> None:
    live = Live(service)

    @router.get("/v1/hasten/live", include_in_schema=False)  # it does not end: no generated request could read it
    async def events(http: HttpRequest) -> Response:
        """The engine, followed until the client leaves."""
        if not service.engine.healthy:
            raise overloaded(f"the engine has failed: {service.engine.error}", seconds=30)
        found = live.events()
        http.state.cleanup.append(found.aclose)
        return EventStream(found)
