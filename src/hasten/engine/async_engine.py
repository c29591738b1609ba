"""The engine behind asyncio: one thread runs its steps, any number of coroutines ask and read.

The two sides meet in an inbox (requests, aborts and other calls, taken in before each step) and, for each request, a
bounded queue of outputs, delivered once a step. What can be refused, for lack of room too, is refused at once, without
waiting for a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.engine.engine_thread import EngineThread
from hasten.engine.request import DeadlineExceeded, EngineFailed, Request, RequestOutput, SlowReader
from hasten.engine.settings import ModelFacts, Stats

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.engine.engine import Engine
    from hasten.engine.watch import Watched


class _Reader(asyncio.Queue[RequestOutput | Exception]):
    """The unread outputs of one call, on the event loop's side."""

    overrun = False

    def push(self, output: RequestOutput | Exception) -> None:
        if self.overrun or self.full():
            self.overrun = True
        else:
            self.put_nowait(output)


class AsyncEngine:
    """An engine for coroutines. Make it in any thread; use it from event loops."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ready: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, RequestOutput | Exception]]] = {}
        self.thread = EngineThread(engine, after_step=self._deliver)

    @property
    def healthy(self) -> bool:
        return self.error is None

    @property
    def error(self) -> str | None:
        """Why it is not healthy."""
        return self.engine.error or (None if self.thread.alive else "the engine was closed")

    @property
    def facts(self) -> ModelFacts:
        return self.engine.facts

    def stats(self) -> Stats:
        return self.engine.stats()

    def replica_stats(self) -> dict[str, Stats]:
        """By the replica's name; this is the only one, without a name."""
        return {"": self.stats()}

    async def generate(self, *requests: Request) -> AsyncGenerator[RequestOutput]:
        """The outputs of requests as they come. Closing the iterator aborts what is left: its blocks are free after the
        step. What fails for one of them ends them all.

        Raises RequestRefused or QueueFull before anything is computed, DeadlineExceeded after its timeout, EngineFailed
        when a step failed, SlowReader when too many outputs lay unread.
        """
        admitted = [self.engine.admit(request) for request in requests]
        reader = _Reader(self.engine.settings.reader_limit * len(requests))
        loop = asyncio.get_running_loop()

        def sink(outputs: list[RequestOutput | Exception]) -> None:
            self._ready.setdefault(loop, []).extend((reader, output) for output in outputs)

        unfinished: dict[str, Request] = {}
        try:
            self.thread.submit(admitted, sink)
            unfinished |= {request.id: request for request in requests}
            while unfinished:
                if reader.overrun and reader.empty():
                    names = ", ".join(unfinished)
                    raise SlowReader(f"{reader.maxsize} outputs of request {names} lay unread; the request was aborted")
                output = await reader.get()
                if isinstance(output, Exception):
                    raise output
                self._raise_for(output, unfinished[output.request_id])
                if output.finished:
                    del unfinished[output.request_id]
                yield output
        finally:
            for name in unfinished:
                self.thread.abort(name, sink)

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pooling: str = "mean",
        adapter: str = "",
        timeout: float | None = None,
    ) -> Tensor:
        """States (P, C) float32 of the prompts, see `Engine.embed`; one prompt, read whole, between two steps.

        They have one place in the queue, and the adapter that had its name at first, until the last is done.
        timeout: seconds for all of them. Raises RequestRefused, QueueFull, EngineFailed, DeadlineExceeded.
        """
        import torch

        self.thread.enter()
        adapters, holder = self.engine.adapters, object()
        try:
            async with asyncio.timeout(timeout):
                number = await self._ask(partial(adapters.hold, holder, adapter))
                embed = partial(self.engine.embed, pooling=pooling, adapter=number)
                found = [await self._ask(partial(embed, prompt)) for prompt in prompts]
        except TimeoutError:
            message = f"the embeddings of {len(prompts)} texts were not complete after {timeout} seconds"
            raise DeadlineExceeded(message) from None
        finally:
            self.thread.leave()
            with suppress(EngineFailed):
                self.thread.call(partial(adapters.release, holder))
        return torch.stack(found)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Give the model the adapter in a folder: read while steps run, placed between two of them.

        Of several ranks that hold the model the others read their shares of it there, which holds up the next step.

        Raises RequestRefused for a name that there is, and as `read_adapter` and `place_adapter` do.
        """
        from hasten.checkpoints.adapters import read_adapter
        from hasten.engine import adapters

        adapter = await asyncio.to_thread(read_adapter, self.engine.model, folder)
        await self._ask(partial(adapters.load, self.engine, name, adapter, folder))

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away; requests that run with it go on. Raises RequestRefused for one that there is not."""
        from hasten.engine import adapters

        await self._ask(partial(adapters.unload, self.engine, name))

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watched]:
        """Watch the engine until the block ends, one watcher at a time. Raises EngineFailed when it was closed."""
        from hasten.engine.watch import Watch, Watched

        watch = await self._ask(partial(Watch, self.engine))
        try:
            yield Watched(model=await self._ask(watch.model), look=partial(self._ask, watch.look))
        finally:
            with suppress(EngineFailed):
                self.thread.call(watch.end)

    async def close(self) -> None:
        """Abort what is left and end the thread and the engine."""
        await asyncio.to_thread(self.thread.close)

    def _raise_for(self, output: RequestOutput, request: Request) -> None:
        if output.finish_reason == "abort" and output.stop_reason == "timeout":
            raise DeadlineExceeded(f"request {request.id} was not complete after {request.timeout} seconds")
        if output.finish_reason == "error" and self.engine.error is not None:
            raise EngineFailed(f"the engine failed while request {request.id} was served: {self.engine.error}")

    async def _ask(self, function: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        awaited = asyncio.wrap_future(answer)
        # When a task is cancelled, `awaited` is at once, `answer` not before the loop goes on.
        self.thread.ask(lambda: None if awaited.cancelled() else function(), answer)
        return await awaited

    def _deliver(self) -> None:
        """In the engine's thread: one call into each loop for all outputs of a step."""
        ready, self._ready = self._ready, {}
        for loop, news in ready.items():
            try:
                loop.call_soon_threadsafe(_push_all, news)
            except RuntimeError:  # the loop was closed: nobody reads any more
                for _, output in news:
                    if isinstance(output, RequestOutput):
                        self.thread.abort(output.request_id)


def _push_all(news: list[tuple[_Reader, RequestOutput | Exception]]) -> None:
    for reader, output in news:
        reader.push(output)
