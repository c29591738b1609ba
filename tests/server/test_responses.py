"""OpenAI's Responses, with its own client: items in and out, streams, tools of every kind, stored answers."""

import json

import openai
import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from server_case import TOOL_TEMPLATE, app_of, serving

ANSWER = "def add(a, b):\n    return a + b\n"
ASK = {"model": "tiny", "input": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": False}


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
    with serving(app_of(engine)) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client.with_options(max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def http(engine):
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        yield client


def say(engine, text):
    engine.answer = engine.tokenizer.encode(text, add_special_tokens=False)


def call_of(name, arguments):
    return f"ok <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def prompt_of(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt)


def refused(http, status=400, **fields):
    answer = http.post("/v1/responses", json=ASK | fields)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_a_whole_answer(client, engine):
    found = client.responses.create(**ASK, instructions="Be kind.", metadata={"a": "b"})
    assert found.output_text == ANSWER
    assert (found.status, found.error, found.incomplete_details) == ("completed", None, None)
    assert (found.instructions, found.metadata, found.store) == ("Be kind.", {"a": "b"}, True)
    (message,) = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert found.usage.input_tokens == len(engine.requests[-1].prompt)
    assert found.usage.input_tokens_details.cached_tokens == 1
    assert found.usage.total_tokens == found.usage.input_tokens + len(engine.answer)
    assert prompt_of(engine) == "<|system|>Be kind.<|user|>hi<|assistant|>"


def test_a_stream_is_the_whole_in_events(client):
    events = list(client.responses.create(**ASK, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == ANSWER
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == events[2].item.content == []
    assert events[-1].response.output_text == events[-4].text == ANSWER
    with client.responses.stream(**ASK) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_events_are_named_and_nothing_marks_the_end(http):
    text = http.post("/v1/responses", json=ASK | {"stream": True}).text
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut(client, stream):
    found = client.responses.create(**ASK, max_output_tokens=2, stream=stream)
    if stream:
        last = list(found)[-1]
        assert last.type == "response.incomplete"
        found = last.response
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_output_sent_back(client, engine, stream):
    say(engine, call_of("weather", {"city": "Rome"}))
    found = client.responses.create(**ASK, tools=[TOOL], stream=stream)
    if stream:
        events = list(found)
        kinds = [event.type.removeprefix("response.") for event in events]
        start = kinds.index("function_call_arguments.delta")
        wanted = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        assert kinds[start - 1 :] == [*wanted, "output_item.done", "completed"]
        assert json.loads(events[start].delta) == {"city": "Rome"}
        assert events[start - 1].item.arguments == ""
        assert {event.output_index for event in events[start - 1 : -1]} == {1}
        found = events[-1].response
    message, call = found.output
    assert message.content[0].text == "ok "
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    items = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in found.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    client.responses.create(model="tiny", input=items, tools=[TOOL])
    shown = prompt_of(engine)
    assert '<|assistant|>ok [{"' in shown  # text and call are one turn
    assert shown.endswith("<|tool|>rain<|assistant|>")
    assert call.call_id in shown


def test_a_function_in_a_namespace(client, engine):
    say(engine, call_of("close_agent", {}))
    inner = {"type": "function", "name": "close_agent", "parameters": {"type": "object", "properties": {}}}
    spaces = [{"type": "namespace", "name": name, "description": "x", "tools": [inner]} for name in ("one", "two")]
    found = client.responses.create(**ASK, tools=spaces[:1])
    call = found.output[-1].model_dump()
    assert (call["name"], call["namespace"]) == ("close_agent", "one")
    say(engine, call_of("two.close_agent", {}))
    found = client.responses.create(**ASK, tools=spaces)
    call = found.output[-1].model_dump(exclude_none=True)
    assert (call["name"], call["namespace"]) == ("close_agent", "two")
    client.responses.create(model="tiny", input=[call], tools=spaces)
    assert '"name": "two.close_agent", "arguments": {}' in prompt_of(engine)


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_text(client, engine, stream):
    say(engine, call_of("apply_patch", {"input": "*** x"}))
    tool = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
    tool["format"] = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    found = client.responses.create(**ASK, tools=[tool], stream=stream)
    if stream:
        events = list(found)
        (delta,) = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert delta == "*** x"
        found = events[-1].response
    assert "follows this lark" in prompt_of(engine)
    call = found.output[-1]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** x")
    items = [call.model_dump(exclude_none=True)]
    items.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"})
    client.responses.create(model="tiny", input=items, tools=[tool])
    assert '"arguments": {"input": "*** x"}' in prompt_of(engine)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call(client, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 400}
    (call,) = client.responses.create(**ASK, **asked).output
    assert call.name == "weather"
    assert set(json.loads(call.arguments)) == {"city"}


def test_structured_output(client):
    import pydantic

    class Thing(pydantic.BaseModel):
        kind: bool
        count: int

    assert isinstance(client.responses.parse(**ASK, text_format=Thing, max_output_tokens=400).output_parsed, Thing)
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    found = client.responses.create(**ASK, text={"format": form}, max_output_tokens=400)
    assert set(json.loads(found.output_text)) == {"city"}
    assert found.text.format.schema_ == SCHEMA


def test_logprobs(client):
    found = client.responses.create(**ASK, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = found.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == ANSWER
    assert len(logprobs[0].top_logprobs) == 2
    streamed = []
    for event in client.responses.create(**ASK, top_logprobs=2, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.logprobs
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs]


def test_reasoning_belongs_to_the_answer_that_follows(engine):
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    template = turns + "{{ reasoning_effort }}"
    other = FakeEngine(engine.tokenizer.with_chat_template(template))
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    reasoning["content"] = [{"type": "reasoning_text", "text": "hm"}]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "hi"},
        reasoning,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        reasoning,
        {"role": "user", "content": "go"},
    ]
    with TestClient(app_of(other), base_url="http://localhost") as http:
        body = {"model": "tiny", "input": items, "reasoning": {"effort": "low", "summary": "auto"}}
        assert http.post("/v1/responses", json=body).status_code == 200
    assert prompt_of(other) == "<system>|d<user>|hi<assistant>hm|yes<user>|golow"


def test_an_answer_is_stored_and_continued(client, engine):
    first = client.responses.create(**ASK, instructions="Be kind.")
    assert client.responses.retrieve(first.id).output_text == ANSWER
    assert client.responses.cancel(first.id).status == "completed"
    second = client.responses.create(model="tiny", input="more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert prompt_of(engine) == f"<|user|>hi<|assistant|>{ANSWER}<|user|>more<|assistant|>"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASK, previous_response_id=first.id)
    assert (missing.value.param, missing.value.code) == ("previous_response_id", "previous_response_not_found")
    client.responses.create(model="tiny", input="again", previous_response_id=second.id)
    assert "<|user|>hi<" in prompt_of(engine)  # a later answer has its whole conversation
    hidden = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_only_the_latest_answers_are_kept(engine):
    def ask(http):
        return http.post("/v1/responses", json=ASK).json()["id"]

    for settings, kept in (({"stored_responses": 2}, 2), ({"bodies_bytes": 3000}, 1), ({"stored_responses": 0}, 0)):
        with TestClient(app_of(engine, **settings), base_url="http://localhost") as http:
            names = [ask(http) for _ in range(4)]
            found = [http.get(f"/v1/responses/{name}").status_code for name in names]
        assert found[4 - kept :] == [200] * kept
        assert found[: 3 - kept] == [404] * (3 - kept), settings


def test_tokens_are_counted(http, engine):
    body = ASK | {"tools": [TOOL], "instructions": "Be kind."}
    found = http.post("/v1/responses/input_tokens", json=body).json()
    assert not engine.requests
    http.post("/v1/responses", json=body)
    assert found == {"object": "response.input_tokens", "input_tokens": len(engine.requests[-1].prompt)}


def test_what_cannot_be_followed_is_left_out_and_named(http, engine):
    tools = [TOOL, {"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
    fields = {"tools": tools, "no_such_field": 1, "include": ["reasoning.encrypted_content"], "service_tier": "auto"}
    answer = http.post("/v1/responses", json=ASK | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hasten-ignored"] == "no_such_field,tools.web_search,tools.local_shell"
    assert "web_search" not in prompt_of(engine)
    with TestClient(app_of(engine, strict_fields=True), base_url="http://localhost") as strict:
        assert refused(strict, tools=tools)["param"] == "tools.web_search"


REFUSED = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, ...),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_wrong_is_named(http, fields, param):
    error = refused(http, **fields)
    assert param is ... or error["param"] == param, error


def test_strict_length_names_the_field(engine):
    with TestClient(app_of(engine, strict_length=True), base_url="http://localhost") as http:
        assert refused(http, max_output_tokens=100_000)["param"] == "max_output_tokens"


def test_a_failure_in_the_middle_of_a_stream(client, engine):
    engine.fails_after = 2
    last = list(client.responses.create(**ASK, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "engine_failed"
    assert not engine.running


def test_codexs_recorded_request(http, engine):
    """As version 0.171 sends it: developer and user items, namespaces, what runs at OpenAI, bookkeeping."""
    text = [{"type": "input_text", "text": "word " * 80}]
    inner = {"type": "function", "name": "close_agent", "description": "x", "strict": False, "parameters": SCHEMA}
    body = {
        "model": "tiny",
        "stream": True,
        "input": [
            *({"type": "message", "id": f"msg_{i}", "role": "developer", "content": text} for i in range(2)),
            *({"type": "message", "id": f"msg_{i}", "role": "user", "content": text} for i in range(2)),
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
            | {"content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "status": "completed", "id": "fc_1", "name": "exec_command", "call_id": "call_1"}
            | {"arguments": '{"cmd": "echo hi"}'},
            {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "hi"},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "description": "x", "strict": False, "parameters": SCHEMA},
            {"type": "namespace", "name": "multi_agent_v1", "description": "x", "tools": [inner]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s"},
    }
    say(engine, call_of("exec_command", {"city": "x"}))
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hasten-ignored"] == "tools.web_search"
    assert '"type":"function_call"' in answer.text
    assert '"arguments": {"cmd": "echo hi"}' in prompt_of(engine)
