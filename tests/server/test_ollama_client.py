"""Ollama's own client against a server over HTTP: whole, streamed, tools, structured output, thinking, errors."""

import json

import pytest

from answer_templates import TEMPLATES
from fake_engine import FakeEngine
from server_case import app_of, serving

ollama = pytest.importorskip("ollama", reason="Ollama's client (the extra `test`) is not installed")

TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
SAID = "Hm, so.\n</think>\n\nHello."
CALL = (
    "Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
)


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


@pytest.fixture(scope="module")
def engine(tokenizer):
    return FakeEngine(tokenizer.with_chat_template(TEMPLATES["parameters"]))


@pytest.fixture(autouse=True)
def says(engine):
    """Let the engine say something else for a test."""

    def say(text):
        engine.answer = engine.tokenizer.encode(text, add_special_tokens=False)

    say(SAID)
    engine.fails_after, engine.insists = None, False
    return say


@pytest.fixture(scope="module")
def client(engine):
    with serving(app_of(engine, api_keys=("secret",))) as (url, _):
        yield ollama.Client(host=url, headers={"Authorization": "Bearer secret"}, timeout=20)


def test_whole_and_streamed(client):
    whole = client.chat(**TALK, think=True)
    assert (whole.message.content, whole.message.thinking.strip(), whole.done_reason) == ("Hello.", "Hm, so.", "stop")
    parts = list(client.chat(**TALK, think=True, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello."
    assert "".join(part.message.thinking or "" for part in parts).strip() == "Hm, so."
    assert parts[-1].eval_count == whole.eval_count > 0
    assert parts[-1].eval_duration > 0


def test_generate(client):
    whole = client.generate("tiny", "def add", options={"num_predict": 3}, raw=True)
    assert (whole.done_reason, whole.eval_count) == ("length", 3)
    parts = list(client.generate("tiny", "def add", options={"num_predict": 3}, raw=True, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert client.generate("tiny", "hi", system="Be brief.").response == "Hello."


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_its_result(client, engine, says, stream):
    says(CALL)
    found = client.chat(**TALK, tools=[weather], stream=stream)
    messages = [part.message for part in found] if stream else [found.message]
    (call,) = [call for message in messages for call in message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    says(SAID)
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    (asking,) = [message for message in messages if message.tool_calls]
    second = client.chat(model="tiny", messages=[*TALK["messages"], asking, result], tools=[weather])
    assert second.message.content == "Hello."
    assert "rain in Rome" in engine.tokenizer.decode(engine.requests[-1].prompt)


def test_structured_output(client, engine):
    found = client.chat(**TALK, think=False, format=SCHEMA, options=ollama.Options(num_predict=400))
    assert set(json.loads(found.message.content)) >= {"city"}


def test_models_embeddings_and_errors(client, engine):
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo[f"{shown.details.family}.vocab_size"] == engine.vocabulary
    found = client.embed("tiny", ["def", "add"])
    assert [len(vector) for vector in found.embeddings] == [3, 3]
    with pytest.raises(ollama.ResponseError, match="does not exist here") as caught:
        client.chat(**TALK | {"model": "other"})
    assert caught.value.status_code == 404
    engine.fails_after = 2
    with pytest.raises(ollama.ResponseError, match="failed"):
        list(client.chat(**TALK, stream=True))
