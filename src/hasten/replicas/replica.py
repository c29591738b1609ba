"""One replica: an engine, the calls of the ingress to it, and its reports."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from hasten.engine.request import Constraint, Request, RequestOutput
from hasten.engine.settings import ModelFacts, Stats
from hasten.errors import HastenError
from hasten.replicas.ranks import dead_ranks
from hasten.replicas.routing import KEY_BYTES, Ask
from hasten.server.errors import ApiError
from hasten.server.reasoning import AfterReasoning, ReasoningGate
from hasten.server.settings import ServerSettings
from hasten.server.structured import Grammars, grammar_of

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.engine.async_engine import AsyncEngine

Answer = list[RequestOutput] | HastenError  # what came since the last one, or why nothing more comes


class Report(TypedDict):
    """What a replica reports.

    keys: the first KEY_BYTES of the key of each block that it holds. check: an inconsistency in the books of an idle
    engine, or "".
    """

    keys: bytes
    stats: Stats
    process: int
    check: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A constraint in transit: its schema, which the replica compiles with its own tokenizer, and any gate before."""

    text: str | None
    param: str
    gate: ReasoningGate | None = None


def packed(request: Request) -> Request:
    """The request in a form that can be pickled."""
    given = request.constraint
    grammar = grammar_of(given)
    gate = given.gate if isinstance(given, AfterReasoning) else None
    if grammar is None and gate is None:
        return request
    schema: Any = Schema(None, "", gate) if grammar is None else Schema(grammar.schema, grammar.param, gate)
    return replace(request, constraint=schema)


class Replica:
    """The class that Ray Serve instantiates once in each replica."""

    def __init__(self, make: Callable[[bytes], AsyncEngine], secret: bytes) -> None:
        self.engine = make(secret)
        facts = self.engine.facts
        options: Any = {"vocabulary": facts.vocabulary, "eos_ids": facts.eos_ids}
        self.grammars = Grammars(facts.tokenizer, **options, settings=ServerSettings())

    def facts(self) -> tuple[ModelFacts, int]:
        """Facts about the model, without the tokenizer (the caller has it), and the tokens of a block."""
        return replace(self.engine.facts, tokenizer=None), self.engine.engine.settings.block_size

    async def generate(self, request: Request, *, ask: Ask) -> AsyncGenerator[Answer]:
        """Yield the outputs in batches: all that have arrived since the last one was read. ask: for the router."""
        try:
            schema: Any = request.constraint
            if isinstance(schema, Schema):
                request = replace(request, constraint=await self._constraint(schema))
            outputs = _checked(self.engine.generate(request), request)
            async with aclosing(together(outputs, whole=request.whole)) as answers:
                async for found in answers:
                    yield found
        except HastenError as error:
            yield error
        except ApiError as error:  # the ingress compiled it just so
            yield HastenError(error.message)

    async def _constraint(self, schema: Schema) -> Constraint | None:
        """The constraint that was packed."""
        grammar = None
        if schema.text is not None:
            grammar = await self.grammars.constraint(json.loads(schema.text), param=schema.param)
        tokenizer = self.engine.facts.tokenizer
        return grammar if schema.gate is None or tokenizer is None else AfterReasoning(schema.gate, tokenizer, grammar)

    async def embed(self, prompts: Sequence[Sequence[int]], how: dict[str, Any], *, ask: Ask) -> Tensor | HastenError:
        try:
            return await self.engine.embed(prompts, **how)
        except HastenError as error:
            return error

    def record_routing_stats(self) -> Report:
        """The report that Ray Serve collects regularly and gives to the router."""
        engine = self.engine.engine
        stats = engine.stats()
        wrong = "" if stats.free_blocks == stats.blocks or not engine.idle else "blocks are held by nobody"
        keys = b"".join(key[:KEY_BYTES] for key in engine.blocks.cached)
        return {"keys": keys, "stats": stats, "process": os.getpid(), "check": wrong}

    def check_health(self) -> None:
        """Raise if the engine failed, or another rank; Ray Serve then replaces the replica."""
        if self.engine.error is not None:
            raise RuntimeError(self.engine.error)
        if dead := dead_ranks():
            raise RuntimeError(f"rank {', '.join(map(str, dead))} of the replica has ended")


async def _checked(outputs: AsyncGenerator[RequestOutput], request: Request) -> AsyncGenerator[RequestOutput]:
    """Report in each output what became of the constraint, because the ingress cannot see it."""
    async with aclosing(outputs):
        async for output in outputs:
            grammar = grammar_of(request.constraint)
            if output.finish_reason == "stop" and grammar is not None and grammar.error:
                output = replace(output, finish_reason="error", stop_reason=f"the constraint broke: {grammar.error}")
            yield output


async def together(outputs: AsyncGenerator[RequestOutput], *, whole: bool) -> AsyncGenerator[list[RequestOutput]]:
    """Batch outputs: each list has all that arrived since the last one (with `whole`, one list at the end)."""
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
