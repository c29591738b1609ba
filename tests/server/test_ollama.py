"""Ollama's API: read into the one form of a conversation, and answered in its lines, counts and errors."""

import dataclasses
import json
import socket

import pytest
from starlette.testclient import TestClient

from answer_templates import TEMPLATES
from fake_engine import FakeEngine
from hasten import __version__
from hasten.engine.request import QueueFull
from hasten.server.ollama_models import VERSION
from server_case import TOOL_TEMPLATE, app_of, serving, wait_until

ANSWER = "def add(a, b):\n    return a + b\n"
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Rome", "Bern")
)
COUNTED = {"prompt_eval_count", "eval_count"}
TIMES = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def fixtures(template):
    """An engine and a client of a model with this chat template."""

    @pytest.fixture(scope="module")
    def engine(tokenizer):
        return FakeEngine(tokenizer.with_chat_template(template))

    return engine


engine, thinker = fixtures(TOOL_TEMPLATE), fixtures(TEMPLATES["parameters"])


@pytest.fixture(autouse=True)
def as_new(engine, thinker):
    """The engines say what they say at first, and fail nothing."""
    yield
    for one in (engine, thinker):
        one.answer = one.tokenizer.encode(ANSWER, add_special_tokens=False)
        one.fails_after = one.refusal = None
        one.insists = False
        one.requests.clear()


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def thinking(thinker):
    with TestClient(app_of(thinker), base_url="http://localhost") as client:
        yield client


def say(engine, text):
    engine.answer = engine.tokenizer.encode(text, add_special_tokens=False)


def ask(client, path="/api/chat", **fields):
    answer = client.post(path, json=TALK | {"stream": False} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(client, path="/api/chat", **fields):
    answer = client.post(path, json=TALK | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(client, path="/api/chat", status=400, **fields):
    answer = client.post(path, json=TALK | fields)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return answer.json()["error"]


def prompt_of(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_whole_answer_and_a_stream(client, engine, path):
    asked = {} if path == "/api/chat" else {"prompt": "hi"}

    def text_of(found):
        return found["message"]["content"] if path == "/api/chat" else found["response"]

    whole, streamed = ask(client, path, **asked), lines(client, path, **asked)
    assert text_of(whole) == ANSWER
    assert "".join(map(text_of, streamed)) == ANSWER
    assert [one["done"] for one in streamed] == [False] * (len(streamed) - 1) + [True]
    for end in (whole, streamed[-1]):
        assert (end["model"], end["done_reason"]) == ("tiny", "stop")
        assert (end["prompt_eval_count"], end["eval_count"]) == (len(engine.requests[-1].prompt), len(engine.answer))
        assert end["total_duration"] == end["prompt_eval_duration"] + end["eval_duration"] > 0
    assert not (COUNTED | TIMES) & set(streamed[0])
    assert prompt_of(engine) == "<|user|>hi<|assistant|>"


def test_a_name_may_have_the_tag_latest(client):
    assert ask(client, model="tiny:latest")["model"] == "tiny:latest"
    assert "does not exist here" in refused(client, status=404, model="tiny:7b")
    assert client.get("/v1/models/tiny:latest").json()["id"] == "tiny"


def test_options_reach_the_engine(client, engine):
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": 2, "stop": ["x"]}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": -1}
    answer = client.post("/api/chat", json=TALK | {"options": options | {"num_ctx": 4096, "num_thread": 2}})
    assert answer.headers["x-hasten-ignored"] == "options.num_ctx,options.num_thread"
    assert json.loads(answer.text.splitlines()[-1])["done_reason"] == "length"
    params = engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 7, 0.9, 0.1, 3)
    assert (params.max_new_tokens, params.stop, params.repetition_penalty) == (2, ("x",), 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    ask(client, options={"seed": -1, "num_predict": -1, "mirostat": 0, "typical_p": 1}, keep_alive="5m")
    params = engine.requests[-1].params
    assert (params.seed, params.max_new_tokens) == (None, 4096 - len(engine.requests[-1].prompt))


REFUSED = [
    ("/api/chat", {"options": {"mirostat": 2}}, "mirostat"),
    ("/api/chat", {"options": {"repeat_last_n": 64}}, "repeat_last_n"),
    ("/api/chat", {"options": {"typical_p": 0.5}}, "typical_p"),
    ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
    ("/api/chat", {"options": {"num_predict": 1.5}}, "options.num_predict"),
    ("/api/chat", {"options": {"stop": "x"}, "format": "json"}, "options.stop cannot be combined"),
    ("/api/chat", {"template": "{{ .Prompt }}"}, "template"),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, "images"),
    ("/api/chat", {"format": {"type": "nothing"}}, "format"),
    ("/api/chat", {"think": True}, '"tiny" does not support thinking'),
    ("/api/chat", {"top_logprobs": 2}, "top_logprobs"),
    ("/api/generate", {"prompt": "hi", "images": ["aGk="]}, "images"),
    ("/api/generate", {"prompt": "hi", "suffix": "x"}, "does not support insert"),
    ("/api/generate", {"prompt": "hi", "context": [1, 2]}, "context"),
    ("/api/generate", {"prompt": "hi", "template": "x"}, "template"),
    ("/api/generate", {"prompt": "hi", "raw": True, "system": "x"}, "system"),
    ("/api/generate", {"prompt": "hi", "raw": True, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ("/api/embed", {"input": "x", "dimensions": 8}, "dimensions"),
]


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(client, path, fields, named):
    assert named in refused(client, path, **fields)


def test_errors_have_ollamas_shape_and_statuses(client, engine):
    assert client.get("/api/nothing").json() == {"error": "there is nothing at /api/nothing"}
    assert client.post("/api/chat", content=b"{").status_code == 415
    engine.refusal = QueueFull("too many", retry_after=3)
    assert "too many" in refused(client, status=503)
    engine.refusal, engine.fails_after = None, 2
    *_, last = lines(client)
    assert list(last) == ["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_objects_as_arguments(client, engine, stream):
    say(engine, f"I look. {CALLS}")
    found = lines(client, tools=[TOOL]) if stream else [ask(client, tools=[TOOL])]
    calls = [call for one in found for call in one["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": i, "name": "weather", "arguments": {"city": city}} for i, city in enumerate(("Rome", "Bern"))
    ]
    assert "".join(one["message"]["content"] for one in found) == "I look. "
    assert found[-1]["done_reason"] == "stop"
    results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("rain", "snow")]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    ask(client, tools=[TOOL], messages=[*TALK["messages"], turn, *results])
    assert '"arguments": {"city": "Rome"}' in prompt_of(engine)
    assert prompt_of(engine).endswith("<|tool|>rain<|tool|>snow<|assistant|>")


def test_arguments_that_come_in_pieces_are_sent_whole(thinking, thinker):
    call = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
    say(thinker, "Hm.\n</think>\n\n" + "\n".join(map(call.format, ("Rome", "Bern"))))
    found = lines(thinking, tools=[TOOL])
    calls = [one["message"]["tool_calls"] for one in found if "tool_calls" in one["message"]]
    assert [[call["function"]["arguments"] for call in part] for part in calls] == [
        [{"city": "Rome"}],
        [{"city": "Bern"}],
    ]


def test_a_call_that_is_cut_off_has_no_arguments(thinking, thinker):
    call = "Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRo"
    say(thinker, call + "me\n</parameter>\n</function>\n</tool_call>")
    room = len(thinker.tokenizer.encode(call, add_special_tokens=False))
    found = ask(thinking, tools=[TOOL], options={"num_predict": room})
    assert found["done_reason"] == "length"
    assert [one["function"]["arguments"] for one in found["message"]["tool_calls"]] == [{}]


def test_a_template_without_tools_cannot_have_them(tokenizer):
    plain = FakeEngine(tokenizer.with_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with TestClient(app_of(plain), base_url="http://localhost") as client:
        assert refused(client, tools=[TOOL]) == '"tiny" does not support tools'
        assert client.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["completion"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_thinking_is_apart(thinking, thinker, stream, path):
    say(thinker, "Hm, so.\n</think>\n\nHello.")
    asked = {"think": True} | ({} if path == "/api/chat" else {"prompt": "hi"})
    found = lines(thinking, path, **asked) if stream else [ask(thinking, path, **asked)]
    said = [one["message"] if path == "/api/chat" else one | {"content": one["response"]} for one in found]
    assert "".join(one.get("thinking", "") for one in said).strip() == "Hm, so."
    assert "".join(one["content"] for one in said) == "Hello."


def test_thinking_reaches_the_template(thinking, thinker):
    prompts = []
    for think in (True, False, "high"):
        ask(thinking, think=think)
        prompts.append(prompt_of(thinker))
    assert prompts[0].rstrip().endswith("<think>")
    assert prompts[1].rstrip().endswith("</think>")
    assert prompts[2].rstrip().endswith("<think>")


@pytest.mark.parametrize("form", ["json", SCHEMA])
def test_a_format_holds_the_answer(client, engine, form):
    found = json.loads(ask(client, format=form, options={"num_predict": 400})["message"]["content"])
    assert isinstance(found, dict)
    if form is SCHEMA:
        assert set(found) == {"city"}
        raw = ask(client, "/api/generate", prompt="x", raw=True, format=form, options={"num_predict": 400})
        assert set(json.loads(raw["response"])) == {"city"}


def test_a_prompt_is_raw_or_in_the_template(client, engine):
    ask(client, "/api/generate", prompt="hi", system="Be brief.")
    assert prompt_of(engine) == "<|system|>Be brief.<|user|>hi<|assistant|>"
    ask(client, "/api/generate", prompt="def add", raw=True)
    assert prompt_of(engine) == "def add"
    assert engine.requests[-1].params.max_new_tokens > 4000


def test_a_model_without_template_continues_a_prompt(tokenizer):
    bare = FakeEngine(dataclasses.replace(tokenizer, templates={}))
    with TestClient(app_of(bare), base_url="http://localhost") as client:
        assert ask(client, "/api/generate", prompt="def add")["response"] == ANSWER
        assert prompt_of(bare) == "def add"


def test_the_last_turn_of_the_assistant_is_continued(client, engine):
    ask(client, messages=[*TALK["messages"], {"role": "assistant", "content": "Hel"}])
    assert prompt_of(engine).endswith("<|assistant|>Hel")
    ask(client, messages=[*TALK["messages"], {"role": "assistant", "content": "\n"}])
    assert prompt_of(engine) == "<|user|>hi<|assistant|>"


@pytest.mark.parametrize(("path", "fields"), [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})])
def test_nothing_to_answer_asks_whether_the_model_is_loaded(client, engine, path, fields):
    found = ask(client, path, **fields)
    assert (found["done"], found["done_reason"]) == (True, "load")
    assert not engine.requests


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("raw", [False, True])
def test_log_probabilities(client, path, raw):
    asked = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    found = lines(client, path, prompt="hi", raw=raw, **asked) if path == "/api/generate" else lines(client, **asked)
    scores = [score for one in found for score in one.get("logprobs", ())]
    assert [score["logprob"] for score in scores] == [-0.5] * 3
    assert [len(score["top_logprobs"]) for score in scores] == [2] * 3


def test_embeddings(client):
    found = client.post("/api/embed", json={"model": "tiny", "input": ["def", "def add"]}).json()
    first, second = found["embeddings"]
    assert sum(x * x for x in first) == pytest.approx(1)
    assert first != second
    assert found["prompt_eval_count"] == 3
    one = client.post("/api/embed", json={"model": "tiny", "input": "def", "truncate": True})
    assert one.json()["embeddings"] == [first]
    assert one.headers["x-hasten-ignored"] == "truncate"


def test_the_model_is_described(client, thinking):
    assert client.get("/api/version").json() == {"version": VERSION, "hasten": __version__}
    (listed,) = client.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"], len(listed["digest"])) == ("tiny:latest", "tiny:latest", 64)
    shown = client.post("/api/show", json={"model": "tiny:latest", "verbose": True}).json()
    assert shown["template"] == TOOL_TEMPLATE
    assert shown["capabilities"] == ["completion", "tools"]
    assert thinking.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == [
        "completion",
        "tools",
        "thinking",
    ]
    assert client.post("/api/show", json={"model": "other"}).status_code == 404


def test_a_client_that_goes_away_is_aborted(tokenizer):
    endless = FakeEngine(tokenizer.with_chat_template(TOOL_TEMPLATE), delay=0.005)
    endless.endless = True
    body = json.dumps(TALK).encode()
    head = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serving(app_of(endless)) as (url, _):
        with socket.create_connection(url.removeprefix("http://").split(":")) as connection:
            connection.sendall(head % len(body) + body)
            assert connection.recv(10) == b"HTTP/1.1 2"
        wait_until(lambda: not endless.running)
    assert len(endless.aborted) == 1
