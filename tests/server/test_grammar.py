"""Grammars from strangers: what cannot work is refused before it runs, what breaks later ends alone."""

import asyncio
import itertools
import threading
import time

import openai
import pytest
import torch

from hasten.server import structured
from hasten.server.settings import ServerSettings
from hasten.server.structured import Grammars
from server_case import app_of, serving

BOMB = {"type": "string", "pattern": "^((a{100}){100}){100}$"}
HOPELESS = {
    "an exploding pattern": BOMB,
    "another": {"type": "string", "pattern": "^(a?){1000}a{1000}$"},
    "one behind a field": {
        "type": "object",
        "properties": {"kind": {"enum": ["x"]}, "name": BOMB},
        "required": ["name"],
    },
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "too many choices": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    "nothing": False,
}


def ask(client, schema, **extra):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "def", "max_tokens": 200, "response_format": form} | extra
    )


@pytest.mark.parametrize("schema", HOPELESS.values(), ids=HOPELESS)
def test_a_schema_that_cannot_be_followed_is_refused_before_the_engine_hears_of_it(client, engine, schema):
    before = len(engine.requests)
    answer = ask(client, schema)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format"), answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert len(engine.requests) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "integer", "no-such-word": 1},  # JSON schema ignores words that it does not have
        {"type": "string", "maxLength": 10_000},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}},
        {
            "anyOf": [
                {"type": "object", "properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(60)
            ]
        },
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
    ],
)
def test_a_large_schema_is_served(client, schema):
    answer = ask(client, schema)
    assert answer.status_code == 200, answer.text


def test_a_grammar_that_breaks_half_way_ends_its_own_request_and_names_the_field(engine, monkeypatch):
    monkeypatch.setattr("hasten.server.structured.rehearse", lambda *_, **__: None)
    with (
        serving(app_of(engine)) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB}}
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "response_format": form}
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(**ask, max_tokens=99)
        assert (refusal.value.param, refusal.value.code) == ("response_format", "structure_failed")
        with pytest.raises(openai.APIError) as broken:
            for _ in client.chat.completions.create(**ask, stream=True):
                pass
        assert broken.value.param == "response_format"
        assert client.completions.create(model="tiny", prompt="def", max_tokens=2).choices[0].text


def test_a_grammar_that_goes_on_being_slow_ends(engine, monkeypatch):
    tokenizer = engine.tokenizer
    grammars = Grammars(
        tokenizer, vocabulary=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids, settings=ServerSettings()
    )
    constraint = asyncio.run(grammars.constraint({"type": "array", "items": {"type": "integer"}}, param="tools"))
    grammars.close()
    clock = (count * structured.ALLOWANCE * 0.9 for count in itertools.count())
    monkeypatch.setattr(structured.time, "thread_time", lambda: next(clock))
    row = torch.zeros(tokenizer.vocab_size)
    constraint.mask(row)
    assert constraint.error is None  # once is forgiven
    constraint.mask(row)
    assert "ms of computing" in constraint.error
    assert torch.isfinite(row).nonzero().flatten().tolist() == sorted(tokenizer.eos_ids)


def test_the_vocabulary_is_prepared_once_and_by_no_thread_that_gives_way(engine, monkeypatch):
    """It holds Python's lock: at a low priority, on a busy machine, the whole server would wait for it."""
    threads, real = [], structured.LLTokenizer

    def slow(*args, **options):
        threads.append(threading.current_thread().name)
        time.sleep(0.2)
        return real(*args, **options)

    monkeypatch.setattr(structured, "LLTokenizer", slow)
    settings, tokenizer = ServerSettings(grammar_timeout=0.15), engine.tokenizer
    grammars = Grammars(tokenizer, vocabulary=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids, settings=settings)
    monkeypatch.setattr(structured, "rehearse", lambda *_, **__: None)

    async def together():
        return await asyncio.gather(*(grammars.constraint({"const": i}, param="tools") for i in range(3)))

    assert len(asyncio.run(together())) == 3  # that time is not the schemas'
    grammars.close()
    assert len(threads) == 1
    assert not threads[0].startswith("grammar")


def test_a_conversation_is_refused_before_its_schema_is_compiled(client, monkeypatch):
    monkeypatch.setattr(Grammars, "_compile", lambda *_: pytest.fail("compiled"))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 17}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 20_000}], "response_format": form}
    answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text


def test_equal_schemas_that_arrive_together_are_compiled_once(engine, monkeypatch):
    compiled = []
    monkeypatch.setattr(structured, "rehearse", lambda *_, **__: compiled.append(time.sleep(0.05)))
    tokenizer = engine.tokenizer
    grammars = Grammars(
        tokenizer, vocabulary=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids, settings=ServerSettings()
    )

    async def together(schema):
        asked = [grammars.constraint(schema, param="tools") for _ in range(8)]
        return await asyncio.gather(*asked, return_exceptions=True)

    def row_of(constraint):
        row = torch.zeros(tokenizer.vocab_size)
        constraint.mask(row)
        return row

    (digit,) = tokenizer.encode("1", add_special_tokens=False)
    first, *others = asyncio.run(together({"type": "integer"}))
    before = row_of(first)
    first.advance(digit)
    assert all(torch.equal(row_of(other), before) for other in others)  # each its own copy
    assert len(compiled) == 1
    refusals = asyncio.run(together({"type": "object", "patternProperties": {"(": True}}))
    assert len({str(refusal) for refusal in refusals}) == 1
    assert "refused" in str(refusals[0])
    grammars.close()
