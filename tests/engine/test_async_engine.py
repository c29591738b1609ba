"""Coroutines in front of the engine: outputs as they come, aborts, and every way to be refused."""

import asyncio
import threading

import pytest
import torch

import hasten
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.request import DeadlineExceeded, EngineFailed, QueueFull, RequestRefused, SlowReader
from references import tiny_llama
from serving_cases import make_engine, request

PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def serve(model, main, **settings):
    """Run `main(engine)` in an event loop; nothing is left afterwards."""

    async def whole():
        engine = AsyncEngine(make_engine(model, **settings))
        try:
            return await main(engine)
        finally:
            await engine.close()
            assert engine.engine.blocks.free == engine.engine.blocks.blocks
            assert not engine.healthy

    return asyncio.run(whole())


async def collect(engine, one):
    return [piece async for piece in engine.generate(one)]


def test_many_readers_get_their_own_texts(model):
    prompts = [PROMPT[: 3 + i] for i in range(12)]

    async def main(engine):
        return await asyncio.gather(
            *(collect(engine, request(str(i), prompt, max_new_tokens=8)) for i, prompt in enumerate(prompts))
        )

    for prompt, pieces in zip(prompts, serve(model, main), strict=True):
        (alone,) = hasten.generate(model, prompt, temperature=0, ignore_eos=True, max_new_tokens=8)
        assert [token for piece in pieces for token in piece.tokens] == alone.tokens


def test_a_reader_that_leaves_frees_its_blocks(model):
    async def main(engine):
        reader = engine.generate(request("a", PROMPT, max_new_tokens=400))
        await anext(reader)
        await reader.aclose()
        async with asyncio.timeout(5.0):
            while not engine.engine.idle:
                await asyncio.sleep(0.01)
        return engine.stats()

    stats = serve(model, main)
    assert (stats.aborted, stats.free_blocks) == (1, stats.blocks)


def test_refusals_come_before_any_step(model):
    async def main(engine):
        with pytest.raises(RequestRefused):
            await collect(engine, request("a", []))
        engine.engine.step = None  # nothing may need one
        readers = [engine.generate(request(name, PROMPT)) for name in "ab"]
        engine.thread.call = lambda function: engine.thread._inbox.append(function)
        waiting = [asyncio.create_task(anext(reader)) for reader in readers]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await collect(engine, request("c", PROMPT))
        with pytest.raises(RequestRefused):  # also where the queue is full: to come again would not help
            await collect(engine, request("d", []))
        for task in waiting:
            task.cancel()
        engine.thread._inbox.clear()
        del engine.engine.step

    serve(model, main, queue_limit=2)


def test_of_several_prompts_all_are_queued_or_none(model):
    async def main(engine):
        good = [request(name, PROMPT, max_new_tokens=4) for name in "abc"]
        with pytest.raises(RequestRefused):
            await anext(engine.generate(*good[:2], request("d", [])))
        with pytest.raises(RequestRefused, match="queue_limit"):
            await anext(engine.generate(*good))
        engine.thread.enter()
        with pytest.raises(QueueFull):
            await anext(engine.generate(*good[:2]))
        engine.thread.leave()
        assert (engine.stats().requests, engine.thread.waiting) == (0, 0)
        found = [output async for output in engine.generate(*good[:2])]
        assert sum(output.finished for output in found) == 2

    serve(model, main, queue_limit=2)


def test_a_deadline_raises(model):
    async def main(engine):
        with pytest.raises(DeadlineExceeded, match="request a"):
            await collect(engine, request("a", PROMPT, max_new_tokens=400, timeout=0.01))

    serve(model, main)


def test_a_failed_engine_tells_readers_and_newcomers(model, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a kernel gave up")

    async def main(engine):
        reader = engine.generate(request("a", PROMPT, max_new_tokens=400))
        await anext(reader)
        monkeypatch.setattr(model, "forward", fail)
        with pytest.raises(EngineFailed, match="a kernel gave up"):
            async for _ in reader:
                pass
        assert not engine.healthy
        assert "a kernel gave up" in engine.error
        with pytest.raises(EngineFailed):
            await collect(engine, request("b", PROMPT))

    serve(model, main)


def test_a_slow_reader_is_dropped(model):
    async def main(engine):
        reader = engine.generate(request("a", PROMPT, max_new_tokens=300))
        await anext(reader)
        while not engine.engine.idle:
            await asyncio.sleep(0.01)
        with pytest.raises(SlowReader, match="4 outputs"):
            async for _ in reader:
                pass

    serve(model, main, reader_limit=4)


def test_closing_ends_everybody_and_takes_nothing_new(model):
    async def main(engine):
        reader = engine.generate(request("a", PROMPT, max_new_tokens=450))
        await anext(reader)
        closing = asyncio.create_task(engine.close())
        pieces = [piece async for piece in reader]
        await closing
        assert pieces[-1].finish_reason == "abort"
        with pytest.raises(EngineFailed, match="closed"):
            await collect(engine, request("b", PROMPT))

    serve(model, main, blocks=200)


def test_embeddings_come_between_steps(model):
    async def main(engine):
        reading = asyncio.create_task(collect(engine, request("a", PROMPT, max_new_tokens=50)))
        found = await engine.embed([PROMPT, PROMPT[:4]], pooling="last")
        await reading
        with pytest.raises(RequestRefused):
            await engine.embed([[]])
        return found

    found = serve(model, main)
    own = make_engine(model)
    torch.testing.assert_close(found[1], own.embed(PROMPT[:4], pooling="last"))


def test_a_second_request_of_the_same_id_does_not_end_the_first(model):
    async def main(engine):
        first, second = (request("a", PROMPT, max_new_tokens=30, n=n) for n in (1, 2))
        served, refused = await asyncio.gather(collect(engine, first), collect(engine, second), return_exceptions=True)
        assert sum(len(piece.tokens) for piece in served) == 30
        assert isinstance(refused, RequestRefused)
        assert "in flight" in str(refused)

    serve(model, main)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_outside_a_step_leaves_nobody_waiting(model):
    async def main(engine):
        reader = engine.generate(request("a", PROMPT, max_new_tokens=400, n=2))
        await anext(reader)

        def wrong():
            raise ValueError("a mistake of ours")

        engine.thread.call(wrong)
        with pytest.raises(EngineFailed, match="a mistake of ours"):
            async for _ in reader:
                pass
        assert not engine.healthy

    serve(model, main)


def test_only_requests_take_places_in_the_queue(model):
    async def main(engine):
        for name in "abcdefgh":
            reader = engine.generate(request(name, PROMPT, max_new_tokens=400))
            await anext(reader)
            await reader.aclose()  # an abort, in the inbox
        for _ in range(8):
            engine.thread.abort("nobody")
        return await collect(engine, request("z", PROMPT, max_new_tokens=2))

    assert serve(model, main, queue_limit=1)[-1].finish_reason == "length"


def test_samples_that_lost_their_blocks_do_not_keep_others_out(model):
    """They wait, too, but a request that was let in is not sent away for their sake (which was a 500)."""

    async def main(engine):
        one = request("a", PROMPT, max_new_tokens=60, n=8, params=None)
        reading = asyncio.create_task(collect(engine, one))
        while not engine.engine.scheduler.waiting or engine.engine.scheduler.preemptions == 0:
            await asyncio.sleep(0.001)
        assert len(engine.engine.scheduler.waiting) >= 1
        assert engine.thread.waiting == 0
        pieces = await collect(engine, request("b", PROMPT[:3], max_new_tokens=2))
        await reading
        return pieces

    assert serve(model, main, queue_limit=1, blocks=60, max_sequences=8)[-1].finish_reason == "length"


def test_embeddings_have_the_queues_limit_and_a_deadline(model, monkeypatch):
    async def main(engine):
        entered, go_on = threading.Event(), threading.Event()
        own = engine.engine.embed
        done = []

        def slowly(prompt, **settings):
            entered.set()
            assert go_on.wait(20)
            done.append(prompt)
            return own(prompt, **settings)

        monkeypatch.setattr(engine.engine, "embed", slowly)
        first = asyncio.create_task(engine.embed([PROMPT, PROMPT[:2]]))
        await asyncio.to_thread(entered.wait, 20)
        second = asyncio.create_task(engine.embed([PROMPT[:5]], timeout=0.02))
        with pytest.raises(DeadlineExceeded, match="1 texts"):
            await second
        third = asyncio.create_task(engine.embed([PROMPT[:5]]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await engine.embed([PROMPT])
        third.cancel()
        go_on.set()
        assert (await first).shape == (2, model.config.hidden_size)
        assert done == [PROMPT, PROMPT[:2]]  # nothing is computed for those who went
        assert engine.thread.waiting == 0
        await engine.close()
        with pytest.raises(EngineFailed, match="closed"):
            await engine.embed([PROMPT])

    serve(model, main, queue_limit=2)


def test_what_is_handed_in_too_late_is_told_so(model):
    async def main(engine):
        engine.thread.close()
        pieces = []
        with pytest.raises(EngineFailed, match="closed"):
            engine.thread.submit([request("a", PROMPT)], pieces.append)
        engine.thread.abort("a")
        assert (engine.thread.waiting, pieces) == (0, [])

    serve(model, main)
