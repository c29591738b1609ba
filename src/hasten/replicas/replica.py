"""One replica: an engine, what it is asked by the ingress, and what it reports."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from hasten.engine.request import Request, RequestOutput
from hasten.engine.settings import ModelFacts, Stats
from hasten.errors import HastenError
from hasten.replicas.routing import KEY_BYTES, Ask
from hasten.server.responses import ApiError
from hasten.server.settings import ServerSettings
from hasten.server.structured import Grammar, Grammars

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.engine.async_engine import AsyncEngine

Answer = list[RequestOutput] | HastenError  # what came since the last one, or why nothing more comes


class Report(TypedDict):
    """keys: of the blocks it holds, the first KEY_BYTES of each. check: what is wrong with its books, if it is idle."""

    keys: bytes
    stats: Stats
    process: int
    check: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A constraint on its way to a replica, which has its own tokenizer's grammars."""

    text: str
    param: str


def packed(request: Request) -> Request:
    """The request as it can be sent."""
    grammar = request.constraint
    if not isinstance(grammar, Grammar):
        return request
    schema: Any = Schema(grammar.schema, grammar.param)
    return replace(request, constraint=schema)


class Replica:
    """What Ray Serve makes, once for each replica."""

    def __init__(self, make: Callable[[bytes], AsyncEngine], secret: bytes) -> None:
        self.engine = make(secret)
        facts = self.engine.facts
        options: Any = {"vocabulary": facts.vocabulary, "eos_ids": facts.eos_ids}
        self.grammars = Grammars(facts.tokenizer, **options, settings=ServerSettings())

    def facts(self) -> tuple[ModelFacts, int]:
        """Facts about the model, without the tokenizer (the caller has it), and the tokens of a block."""
        return replace(self.engine.facts, tokenizer=None), self.engine.engine.settings.block_size

    async def generate(self, request: Request, *, ask: Ask) -> AsyncGenerator[Answer]:
        """The outputs; as many at once as there are when the last ones have been taken. ask: what the router reads."""
        try:
            schema: Any = request.constraint
            if isinstance(schema, Schema):
                grammar = await self.grammars.constraint(json.loads(schema.text), param=schema.param)
                request = replace(request, constraint=grammar)
            outputs = _checked(self.engine.generate(request), request)
            async with aclosing(together(outputs, whole=request.whole)) as answers:
                async for found in answers:
                    yield found
        except HastenError as error:
            yield error
        except ApiError as error:  # the ingress compiled it just so
            yield HastenError(error.message)

    async def embed(self, prompts: Sequence[Sequence[int]], how: dict[str, Any], *, ask: Ask) -> Tensor | HastenError:
        try:
            return await self.engine.embed(prompts, **how)
        except HastenError as error:
            return error

    def record_routing_stats(self) -> Report:
        """What Ray Serve asks for now and then, and gives to the router."""
        engine = self.engine.engine
        stats = engine.stats()
        wrong = "" if stats.free_blocks == stats.blocks or not engine.idle else "blocks are held by nobody"
        keys = b"".join(key[:KEY_BYTES] for key in engine.blocks.cached)
        return {"keys": keys, "stats": stats, "process": os.getpid(), "check": wrong}

    def check_health(self) -> None:
        """Ray Serve takes a replica away that raises here, and starts another."""
        if self.engine.error is not None:
            raise RuntimeError(self.engine.error)


async def _checked(outputs: AsyncGenerator[RequestOutput], request: Request) -> AsyncGenerator[RequestOutput]:
    """Report in each output what became of the constraint, because the ingress cannot see it."""
    async with aclosing(outputs):
        async for output in outputs:
            grammar = request.constraint
            if output.finish_reason == "stop" and isinstance(grammar, Grammar) and grammar.error:
                output = replace(output, finish_reason="error", stop_reason=f"the constraint broke: {grammar.error}")
            yield output


async def together(outputs: AsyncGenerator[RequestOutput], *, whole: bool) -> AsyncGenerator[list[RequestOutput]]:
    """What has come since the last was taken, in one list; all at the end if `whole`. Closing it closes them."""
    if whole:
        async with aclosing(outputs):
            yield [output async for output in outputs]
        return
    ready: list[RequestOutput] = []
    news = asyncio.Event()

    async def read() -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    ready.append(output)
                    news.set()
        finally:
            news.set()

    reading = asyncio.create_task(read())
    try:
        while not reading.done() or ready:
            await news.wait()
            news.clear()
            if ready:
                found, ready[:] = ready.copy(), ()
                yield found
        await reading  # raises what it raised
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await reading
