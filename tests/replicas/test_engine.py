"""The ingress's side: where a request goes when replicas die, without Ray; replicas are engines in this process."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

import hasten
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.request import EngineFailed, QueueFull, Request, RequestRefused
from hasten.engine.settings import EngineSettings
from hasten.replicas import engine as module
from hasten.replicas.engine import RETRIES, ReplicaDied, ReplicatedEngine
from hasten.replicas.replica import Replica
from hasten.replicas.routing import Board
from hasten.server.app import make_app
from hasten.server.service import Service
from hasten.server.settings import ServerSettings
from references import tiny_llama

SECRET = b"of both"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}


class LocalChannel:
    """Two replicas in this process. `dies`: answers after which the next ones die, one entry for each request sent."""

    def __init__(self, model):
        def make(secret):
            settings = EngineSettings(max_sequences=8, token_budget=32, cache_bytes=1 << 20, queue_limit=6)
            return AsyncEngine(Engine(model, model.tokenizer, settings, secret=secret))

        self.board = Board()
        self.replicas = {name: Replica(make, SECRET) for name in ("a", "b")}
        self.board.replace(self.replicas)
        self.dies = []
        self.sent = []
        facts, size = self.replicas["a"].facts()
        facts = replace(facts, tokenizer=model.tokenizer)
        self.engine = ReplicatedEngine(self, self.board, facts, block_size=size, secret=SECRET)

    def _send(self, ask):
        name = self.board.rank(ask)[0]
        self.board.sent(ask, name)
        self.sent.append(name)
        return self.replicas[name], self.dies.pop(0) if self.dies else None

    async def generate(self, ask, request):
        replica, left = self._send(ask)
        async with aclosing(replica.generate(request, ask=ask)) as answers:
            async for answer in answers:
                if left == 0:
                    raise ReplicaDied("killed")
                left = left and left - 1
                yield answer

    async def embed(self, ask, prompts, how):
        replica, left = self._send(ask)
        if left == 0:
            raise ReplicaDied("killed")
        return await replica.embed(prompts, how, ask=ask)

    def report(self):
        for name, replica in self.replicas.items():
            self.board.report(name, replica.record_routing_stats())

    async def close(self):
        for replica in self.replicas.values():
            await replica.engine.close()


@pytest.fixture(scope="module")
def model():
    return tiny_llama(max_position_embeddings=512)


@pytest.fixture
def channel(model):
    channel = LocalChannel(model)
    yield channel
    asyncio.run(until_idle(channel))
    channel.report()
    for state in channel.board.states.values():
        assert (state.running, state.unread) == (0, 0)
        assert state.report["check"] == ""
    for stats in channel.engine.replica_stats().values():
        assert stats.free_blocks == stats.blocks
    asyncio.run(channel.engine.close())
    assert not channel.engine.healthy


async def until_idle(channel):
    async with asyncio.timeout(20):
        while not all(replica.engine.engine.idle for replica in channel.replicas.values()):
            await asyncio.sleep(0.005)


def request(prompt, name="r", **changes):
    params = SamplingParams(temperature=0, max_new_tokens=12)
    return Request(**{"id": name, "prompt": tuple(prompt), "params": params} | changes)


async def text_of(engine, *requests):
    texts = {}
    async for output in engine.generate(*requests):
        texts[output.request_id] = texts.get(output.request_id, "") + output.text
    return texts


def expected(model, text):
    return "".join(hasten.stream(model, text, temperature=0, max_new_tokens=12))


def test_texts_are_the_models(model, channel):
    prompts = ["def add", "for name in names:", "print(f'"]
    requests = [request(model.tokenizer.encode(prompt), prompt) for prompt in prompts]
    told = asyncio.run(text_of(channel.engine, *requests))
    assert told == {prompt: expected(model, prompt) for prompt in prompts}
    assert set(channel.sent) == {"a", "b"}, "they are shared out"


def test_the_same_beginning_goes_where_its_blocks_are(model, channel):
    prompt = model.tokenizer.encode("def add(a, b):\n    return a + b\n" * 4)
    asyncio.run(text_of(channel.engine, request(prompt)))
    channel.report()
    for number in range(4):
        asyncio.run(text_of(channel.engine, request([*prompt, 20 + number])))
    assert set(channel.sent) == {channel.sent[0]}
    hits = {name: stats.prefix_hits for name, stats in channel.engine.replica_stats().items()}
    channel.report()
    assert channel.engine.replica_stats()[channel.sent[0]].prefix_hits > hits[channel.sent[0]]


@pytest.mark.parametrize("deaths", [1, RETRIES])
def test_what_had_sent_nothing_is_begun_anew(model, channel, deaths):
    channel.dies = [0] * deaths
    told = asyncio.run(text_of(channel.engine, request(model.tokenizer.encode("def add"))))
    assert told == {"r": expected(model, "def add")}
    assert channel.engine.retried == deaths


def test_a_request_that_kills_replicas_is_given_up(model, channel):
    channel.dies = [0] * 9
    with pytest.raises(EngineFailed, match="not tried again"):
        asyncio.run(text_of(channel.engine, request(model.tokenizer.encode("def add"))))
    assert len(channel.sent) == RETRIES + 1


def test_what_was_streaming_ends_with_an_error(model, channel):
    channel.dies = [2]

    async def read():
        nonlocal said
        async for output in channel.engine.generate(request(model.tokenizer.encode("def add"))):
            said += output.text

    said = ""
    with pytest.raises(EngineFailed, match="the replica that answered has died"):
        asyncio.run(read())
    assert expected(model, "def add").startswith(said)
    assert channel.engine.retried == 0


def test_whole_answers_are_begun_anew_wherever_they_were(model, channel):
    """Over HTTP: nothing of a whole answer is sent before all of it is there."""
    service = Service(channel.engine, model_name="tiny", settings=ServerSettings())
    body = {"model": "tiny", "prompt": "def add", "max_tokens": 12, "temperature": 0}
    with TestClient(make_app(service), base_url="http://localhost") as client:
        channel.dies = [0]  # a whole answer comes in one piece
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == expected(model, "def add")
        assert channel.engine.retried == 1
        channel.dies = [1]
        lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        assert "the replica that answered has died" in lines[-3]
        assert lines[-2] == "data: [DONE]"
        asyncio.run(until_idle(channel))
        channel.report()
        metrics = client.get("/metrics").text
        for name in ("a", "b"):
            assert f'hasten:num_requests_running{{model_name="tiny",replica="{name}"}} 0.0' in metrics
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        talk = [{"role": "user", "content": "hi"}]
        chat = {"model": "tiny", "messages": talk, "max_tokens": 80, "response_format": schema}
        message = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        assert message.replace(" ", "").replace("\n", "") in ('{"n":1}', '{"n":22}')
        channel.dies = [0]
        vectors = client.post("/v1/embeddings", json={"model": "tiny", "input": ["def", "for"]}).json()["data"]
        assert len(vectors) == 2
        asyncio.run(until_idle(channel))


def test_leaving_frees_the_blocks(model, channel):
    async def leave():
        params = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)
        one = request(model.tokenizer.encode("def add"), params=params)
        async with aclosing(channel.engine.generate(one)) as outputs:
            async for _ in outputs:
                break
        await until_idle(channel)

    asyncio.run(leave())
    assert sum(replica.engine.stats().aborted for replica in channel.replicas.values()) == 1


def test_refusals_come_back_as_they_were(model, channel):
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(text_of(channel.engine, request([1, 2], n=9)))
    assert refused.value.field == "n"
    assert channel.sent == [channel.sent[0]], "refused once, not asked elsewhere"


def test_errors_survive_the_way_between_processes():
    import pickle

    full = pickle.loads(pickle.dumps(QueueFull("full", retry_after=2.5)))
    assert (str(full), full.retry_after) == ("full", 2.5)
    refused = pickle.loads(pickle.dumps(RequestRefused("no", field="n")))
    assert (str(refused), refused.field) == ("no", "n")


def test_nobody_waits_for_ever_for_a_replica(model, channel, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)

    async def never(ask, request):
        await asyncio.sleep(3600)
        yield []

    async def never_one(ask, prompts, how):
        await asyncio.sleep(3600)

    monkeypatch.setattr(channel, "generate", never)
    monkeypatch.setattr(channel, "embed", never_one)
    channel.board.replace([])
    tokens = model.tokenizer.encode("def add")
    for asked in (text_of(channel.engine, request(tokens)), channel.engine.embed([tokens])):
        with pytest.raises(EngineFailed, match="no replica has been there"):
            asyncio.run(asked)
    assert not channel.engine.healthy
    channel.board.replace(channel.replicas)
    assert channel.engine.healthy
