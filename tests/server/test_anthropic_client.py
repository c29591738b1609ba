"""Anthropic's own client against a server over HTTP: whole, streamed, tools, structured output, two turns, errors."""

import json
import typing

import pytest

from fake_engine import FakeEngine
from server_case import TOOL_TEMPLATE, app_of, serving

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client (the extra `test`) is not installed")

ANSWER = "def add(a, b):\n    return a + b\n"
TALK = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CALL = 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine(tokenizer):
    return FakeEngine(tokenizer.with_chat_template(TOOL_TEMPLATE))


@pytest.fixture(autouse=True)
def as_new(engine):
    """The engine says what it says at first, and fails nothing."""
    yield
    engine.answer = engine.tokenizer.encode(ANSWER, add_special_tokens=False)
    engine.fails_after = engine.refusal = engine.error = None
    engine.requests.clear()


@pytest.fixture(scope="module")
def client(engine):
    app = app_of(engine, api_keys=("secret",))
    with serving(app) as (url, _), anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


def test_whole_and_streamed(client):
    whole = client.messages.create(**TALK)
    assert (whole.content[0].text, whole.stop_reason, whole.usage.cache_read_input_tokens) == (ANSWER, "end_turn", 1)
    assert whole._request_id
    with client.messages.stream(**TALK) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.content[0].text == ANSWER
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_its_result(client, engine, stream):
    before = engine.answer
    engine.answer = engine.tokenizer.encode(CALL, add_special_tokens=False)
    if stream:
        with client.messages.stream(**TALK, tools=[TOOL]) as events:
            found = events.get_final_message()
    else:
        found = client.messages.create(**TALK, tools=[TOOL])
    text, call = found.content
    assert (text.text, call.name, call.input, found.stop_reason) == (
        "I look. ",
        "weather",
        {"city": "Rome"},
        "tool_use",
    )
    engine.answer = before
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*TALK["messages"], {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**TALK | {"messages": turns}, tools=[TOOL])
    assert second.content[0].text == ANSWER
    assert "<|tool|>rain" in engine.tokenizer.decode(engine.requests[-1].prompt)


def test_structured_output(client):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = client.messages.create(**TALK | {"max_tokens": 400}, extra_body={"output_config": form})
    assert "city" in json.loads(found.content[0].text)


def test_tokens_and_errors(client, engine):
    counted = client.messages.count_tokens(model="tiny", messages=TALK["messages"])
    client.messages.create(**TALK)
    assert counted.input_tokens == len(engine.requests[-1].prompt)
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        client.messages.create(**TALK | {"model": "other"})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**TALK)
    engine.fails_after = 2
    with pytest.raises(anthropic.APIError), client.messages.stream(**TALK) as stream:
        stream.get_final_message()


def test_every_field_of_the_client_is_known():
    from anthropic.types import message_create_params

    from hasten.server.messages import MessagesBody

    fields = set(typing.get_type_hints(message_create_params.MessageCreateParamsBase))
    assert fields <= {*MessagesBody.model_fields, *MessagesBody.bookkeeping, *MessagesBody.neutral}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
