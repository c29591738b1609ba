"""Anthropic's Messages: read into the one form of a conversation, and answered in its events and errors."""

import asyncio
import json

import httpx
import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from hasten.engine.request import QueueFull
from hasten.server.answers import with_pings
from server_case import TOOL_TEMPLATE, app_of, serving, wait_until

ANSWER = "def add(a, b):\n    return a + b\n"
TALK = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
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
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        yield client


def say(engine, text):
    engine.answer = engine.tokenizer.encode(text, add_special_tokens=False)


def ask(client, **fields):
    answer = client.post("/v1/messages?beta=true", json=TALK | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client, **fields):
    answer = client.post("/v1/messages", json=TALK | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt)


def test_a_whole_answer(client, engine):
    found = ask(client)
    assert found.pop("id").startswith("msg_")
    usage = found.pop("usage")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    prompt = len(engine.requests[-1].prompt)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 1, 1)
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == len(engine.answer)


def test_a_stream(client):
    events = events_of(client)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == ANSWER
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


def test_why_it_ended(client, engine):
    assert ask(client, max_tokens=2)["stop_reason"] == "max_tokens"
    found = ask(client, stop_sequences=["return"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "return")
    assert ask(client, max_tokens=100_000)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_sent_back(client, engine, stream):
    say(engine, CALL)
    if stream:
        events = events_of(client, tools=[TOOL])
        starts = [event for event in events if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == [0, 1]
        call = starts[1]["content_block"]
        assert call["input"] == {}
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 1]
        assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Rome"}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        call = call | {"input": {"city": "Rome"}}
    else:
        found = ask(client, tools=[TOOL])
        assert found["stop_reason"] == "tool_use"
        text, call = found["content"]
        assert text == {"type": "text", "text": "I look. "}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert '"parameters": {"type": "object"' in prompt_of(engine)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *TALK["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}, result]},
    ]
    ask(client, tools=[TOOL], messages=turns)
    shown = prompt_of(engine)
    assert '"arguments": {"city": "Rome"}' in shown
    assert shown.endswith("<|tool|>rain<|user|>and now?<|assistant|>")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call(client, choice):
    found = ask(client, tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True}, max_tokens=400)
    assert [block["type"] for block in found["content"]] == ["tool_use"]
    assert set(found["content"][0]["input"]) == {"city"}
    assert found["stop_reason"] == "tool_use"


def test_structured_output(client):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = ask(client, output_config=form, max_tokens=400)
    assert set(json.loads(found["content"][0]["text"])) == {"city"}
    broken = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    answer = client.post("/v1/messages", json=TALK | {"output_config": broken})
    assert answer.status_code == 400
    assert "output_config.format" in answer.json()["error"]["message"]


def test_claude_codes_billing_line_is_left_out(client, engine):
    prompts = []
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        system = [{"type": "text", "text": text} for text in (line, "You code.", "Be kind.")]
        ask(client, system=system, messages=[{"role": "user", "content": "hi"}])
        prompts.append(list(engine.requests[-1].prompt))
    assert prompts[0] == prompts[1]
    assert prompt_of(engine).startswith("<|system|>You code.\nBe kind.<|user|>hi")


def test_a_system_turn_in_the_middle(engine):
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "note"},
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": "more"},
        {"role": "user", "content": "go"},
    ]
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        ask(client, messages=turns)
        assert "<|user|>hi<|system|>note<|assistant|>" in prompt_of(engine)
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    other = FakeEngine(engine.tokenizer.with_chat_template(strict))
    with TestClient(app_of(other), base_url="http://localhost") as client:
        ask(client, messages=turns, system="You code.")
        assert prompt_of(other) == "<system>You code.<user>hi\nnote<assistant>yes<user>more\ngo"
        chat = {"model": "tiny", "messages": turns}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400  # OpenAI's own protocol: as before


def test_the_last_turn_of_the_assistant_is_continued(client, engine):
    ask(client, messages=[*TALK["messages"], {"role": "assistant", "content": "Well, "}])
    assert prompt_of(engine).endswith("<|assistant|>Well, ")


def test_how_much_it_thinks(engine):
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|"
    other = FakeEngine(engine.tokenizer.with_chat_template(template))
    with TestClient(app_of(other), base_url="http://localhost") as client:
        for fields, shown in (
            ({}, "hi|||"),
            ({"thinking": {"type": "disabled"}}, "hi|False||"),
            ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "hi||high|"),
        ):
            ask(client, **fields)
            assert prompt_of(other) == shown


def test_what_cannot_be_followed_is_left_out_and_named(client, engine):
    fields = {
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "no_such_field": 1,
        "context_management": {"edits": []},
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
    }
    answer = client.post("/v1/messages", json=TALK | fields)
    assert answer.status_code == 200, answer.text
    named = "no_such_field,tools.web_search_20250305,thinking.budget_tokens"
    assert answer.headers["x-hasten-ignored"] == named
    assert "web_search" not in prompt_of(engine)
    with TestClient(app_of(engine, strict_fields=True), base_url="http://localhost") as strict:
        for name in ("tools", "thinking", "no_such_field"):
            assert strict.post("/v1/messages", json=TALK | {name: fields[name]}).status_code == 400
        assert strict.post("/v1/messages", json=TALK | {"metadata": {}}).status_code == 200


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL] * 2}, "tools"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"thinking": {"type": "much"}}, "thinking"),
    (
        {"stop_sequences": ["x"], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "stop_sequences",
    ),
    ({"tools": [TOOL | {"name": f"f{i}"} for i in range(129)]}, "tools"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_what_is_wrong_is_named_in_anthropics_shape(client, fields, named):
    answer = client.post("/v1/messages", json=TALK | fields)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_have_anthropics_types(engine):
    with TestClient(app_of(engine, api_keys=("k",)), base_url="http://localhost") as client:
        key = {"x-api-key": "k"}

        def error(status, **how):
            answer = client.post("/v1/messages", **({"json": TALK, "headers": key} | how))
            assert answer.status_code == status
            return answer.json()["error"]["type"]

        assert error(401, headers={}) == "authentication_error"
        assert error(404, json=TALK | {"model": "gpt"}) == "not_found_error"
        assert error(400, content=b"{", headers=key | {"content-type": "application/json"}) == "invalid_request_error"
        engine.refusal = QueueFull("full", retry_after=2)
        assert error(429) == "rate_limit_error"
        engine.error = "a step failed"
        assert error(529) == "overloaded_error"


def test_a_failure_in_the_middle_of_a_stream(client, engine):
    engine.fails_after = 2
    events = events_of(client)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert not engine.running


def test_tokens_are_counted(client, engine):
    body = {"model": "tiny", "messages": TALK["messages"], "tools": [TOOL], "system": "You code."}
    found = client.post("/v1/messages/count_tokens", json=body).json()
    assert not engine.requests
    ask(client, **body)
    assert found == {"input_tokens": len(engine.requests[-1].prompt)}


def test_a_silent_stream_gets_pings():
    closed = []

    async def slow():
        try:
            for number in range(2):
                await asyncio.sleep(0.05)
                yield {"number": number}
        finally:
            closed.append(True)

    async def read(most):
        found = []
        parts = with_pings(slow(), {"type": "ping"}, seconds=0.02)
        async for part in parts:
            found.append(part)
            if len(found) == most:
                break
        await parts.aclose()
        return found

    found = asyncio.run(read(100))
    assert [part for part in found if "number" in part] == [{"number": 0}, {"number": 1}]
    assert found.count({"type": "ping"}) >= 2
    assert asyncio.run(read(1)) == [{"type": "ping"}]
    assert closed == [True, True]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_ends_its_request(tokenizer, path):
    engine = FakeEngine(tokenizer, delay=0.01)
    engine.endless = True
    body = TALK | {"max_tokens": 4000} if path == "/v1/messages" else {"model": "tiny", "input": "hi"}
    with serving(app_of(engine)) as (url, _):
        for stream, patience in ((True, 60), (False, 2)):
            with httpx.Client() as client:
                try:
                    with client.stream("POST", url + path, json=body | {"stream": stream}, timeout=patience) as answer:
                        next(answer.iter_bytes())
                except httpx.ReadTimeout:
                    assert not stream
            wait_until(lambda: not engine.running)
    assert len(engine.aborted) == 2


def filled(value):
    """A recorded shape with its texts at their recorded lengths."""
    if isinstance(value, dict):
        return {name: filled(item) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item) for item in value]
    if value == "<JSON schema>":
        return SCHEMA
    if isinstance(value, str) and value.startswith("<text, "):
        return ("word " * 4000)[: int(value[7:-1])]
    return value


def test_claude_codes_recorded_request(engine):
    """As version 2.1 sends it: three system texts, a system turn, bookkeeping, 32,000 tokens."""
    part = {"type": "text", "text": "<text, 74>"}
    cached = part | {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [part, cached]}, {"role": "system", "content": "<text, 6062>"}],
        "system": [part | {"text": "x-anthropic-billing-header: cch=1;"}, cached, cached],
        "tools": [{"name": f"Agent{i}", "description": "<text, 127>", "input_schema": SCHEMA} for i in range(24)],
        "metadata": {"user_id": "<text, 150>"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    say(engine, CALL.replace("weather", "Agent3"))
    app = app_of(engine, max_length=32_768)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.head("/").status_code == 200
        answer = client.post("/v1/messages?beta=true", json=filled(body))
        assert answer.status_code == 200, answer.text
        assert "x-hasten-ignored" not in answer.headers
    assert '"type":"tool_use"' in answer.text
    assert "billing" not in prompt_of(engine)
