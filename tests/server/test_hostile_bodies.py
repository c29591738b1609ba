"""What strangers send: bodies that are no JSON, too large, too deep, too many; headers without end."""

import json
import sys

import httpx
import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from server_case import PROMPT, app_of, serving


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer)


@pytest.fixture(scope="module")
def strict_client(tokenizer):
    with TestClient(app_of(FakeEngine(tokenizer), strict_fields=True)) as client:
        yield client


def test_deep_arguments_of_a_call_are_refused(client_for_all):
    arguments = '{"a":' * 900 + "1" + "}" * 900  # a text in the body, so no limit on the body's nesting counts it
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    before = sys.getrecursionlimit()
    for limit in (before, 5 * before):  # PyTorch's compiler raises it
        sys.setrecursionlimit(limit)
        try:
            answer = client_for_all.post("/v1/chat/completions", json=body)
        finally:
            sys.setrecursionlimit(before)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "messages[0] is nested too deeply")


HOSTILE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"model": "tiny", "prompt": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 400 + b"}",
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "tiny", "prompt": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}",
    b'{"model": "tiny", "prompt": "x", "' + b"a" * 100_000 + b'": 1}',
    b'{"model": "tiny", "prompt": "x", "logit_bias": {"1": 1e400}}',
    b'{"model": "tiny", "prompt": [1, true]}',
    b'{"model": "tiny", "prompt": [-1]}',
    b'{"model": "tiny", "prompt": ["a", 1]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": {"__class__": 1}}]}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_hostile_bodies_are_refused_with_a_reason(client_for_all, strict_client, path, body):
    headers = {"Content-Type": "application/json"}
    answer = client_for_all.post(path, content=body, headers=headers)
    if "x-hasten-ignored" in answer.headers:  # what is wrong is a field that this path does not have
        answer = strict_client.post(path, content=body, headers=headers)
    assert answer.status_code in (400, 404), answer.text[:200]
    assert answer.json()["error"]["message"]
    assert len(answer.text) < 3000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read(client_for_all, kind):
    """Else a web page could send requests to a server on its reader's machine without being asked."""
    answer = client_for_all.post("/v1/completions", content=json.dumps(PROMPT), headers={"Content-Type": kind})
    assert answer.status_code == 415


def test_bodies_have_a_limit(engine):
    with TestClient(app_of(engine, body_bytes=1000), base_url="http://localhost") as client:
        big = PROMPT | {"prompt": "x" * 2000}
        assert client.post("/v1/completions", json=big).status_code == 413

        def pieces():
            for _ in range(20):
                yield b"x" * 100

        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=pieces(), headers=headers).status_code == 413
        assert client.post("/v1/completions", json=PROMPT).status_code == 200


MANY = {
    "numbers": PROMPT | {"prompt": [1.5] * 500_000},
    "mixed": PROMPT | {"prompt": ["a", 1] * 200_000},
    "lists": PROMPT | {"prompt": [["a"]] * 300_000},
    "keys": PROMPT | {f"k{i}": 1 for i in range(100_000)},
    "biases": PROMPT | {"logit_bias": {str(i): "x" for i in range(100_000)}},
    "messages": {"model": "tiny", "messages": [{}] * 500_000},
    "parts": {"model": "tiny", "messages": [{"role": "user", "content": [{}] * 500_000}]},
    "tools": {"model": "tiny", "messages": [{"role": "user", "content": ""}], "tools": [1] * 500_000},
    "empty messages": {"model": "tiny", "messages": [{"role": "user", "content": ""}] * 50_000},
}


_PART = {"type": "text", "text": ""}


TOO_MANY = {
    "messages": {"messages": [{"role": "user", "content": ""}] * 5000},
    "parts": {"messages": [{"role": "user", "content": [_PART] * 5000}]},
    "parts of several": {"messages": [{"role": "user", "content": [_PART] * 2000}] * 3},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}] * 5000}]},
    "tools": {
        "messages": [{"role": "user", "content": ""}],
        "tools": [{"type": "function", "function": {"name": "f"}}] * 5000,
    },
    "prompts": {"prompt": [""] * 5000},
    "prompts as ids": {"prompt": [[1]] * 5000},
    "stops": {"prompt": "", "stop": ["x"] * 5000},
}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [_PART] * 2000}
_TURN = {"role": "user", "content": ""}
TOO_MANY_OF_OTHERS = {
    "turns": ("/v1/messages", {"messages": [_TURN] * 5000}),
    "blocks": ("/v1/messages", {"messages": [{"role": "user", "content": [_PART] * 2000}] * 3}),
    "results": ("/v1/messages", {"messages": [{"role": "user", "content": [_RESULT] * 3}]}),
    "offered": ("/v1/messages", {"messages": [_TURN], "tools": [{"name": "f"}] * 5000}),
    "items": ("/v1/responses", {"input": [_TURN] * 5000}),
    "item parts": ("/v1/responses", {"input": [{"role": "user", "content": [_PART] * 2000}] * 3}),
    "untyped items": ("/v1/responses", {"input": [{}] * 500_000}),
    "tools": ("/v1/responses", {"input": "", "tools": [{"type": "custom", "name": "f"}] * 5000}),
    "inner tools": ("/v1/responses", {"input": "", "tools": [{"type": "namespace", "tools": [{}] * 2000}] * 3}),
    "Ollama's turns": ("/api/chat", {"messages": [_TURN] * 5000}),
    "Ollama's calls": ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}] * 2000}] * 3}),
    "Ollama's stops": ("/api/generate", {"prompt": "x", "options": {"stop": ["x"] * 500_000}}),
    "texts to embed": ("/api/embed", {"input": ["x"] * 5000}),
    "documents": ("/v1/rerank", {"query": "x", "documents": ["x"] * 500_000}),
    "other documents": ("/v1/rerank", {"query": "x", "documents": [{}] * 300_000}),
    "pairs": ("/score", {"text_1": "x", "text_2": ["x"] * 500_000}),
}


@pytest.mark.parametrize("name", list(TOO_MANY))
def test_too_many_are_refused_before_each_is_looked_at(client_for_all, name):
    """What is checked after the schema has held the event loop while all of it became objects."""
    from pydantic import ValidationError

    from hasten.server.bodies import ChatBody
    from hasten.server.completions import CompletionBody

    body = {"model": "tiny"} | TOO_MANY[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = client_for_all.post(path, json=body)
    field = next(field for field in ("stop", "prompt", "tools", "messages") if field in body)
    assert (answer.status_code, answer.json()["error"]["param"].split("[")[0]) == (400, field)
    with pytest.raises(ValidationError) as refusal:
        (ChatBody if "messages" in body else CompletionBody).model_validate(body)
    assert "too_long" in {error["type"] for error in refusal.value.errors()}


@pytest.mark.parametrize("name", list(TOO_MANY_OF_OTHERS))
def test_too_many_are_refused_in_the_other_protocols(client_for_all, name):
    from pydantic import ValidationError

    from hasten.server import ollama, rerank
    from hasten.server.messages import MessagesBody
    from hasten.server.responses import ResponsesBody

    kinds = {"/v1/messages": MessagesBody, "/v1/responses": ResponsesBody, "/api/chat": ollama.OllamaChatBody}
    kinds |= {"/api/generate": ollama.OllamaGenerateBody, "/api/embed": ollama.OllamaEmbedBody}
    kinds |= {"/v1/rerank": rerank.RerankBody, "/score": rerank.ScoreBody}
    path, body = TOO_MANY_OF_OTHERS[name]
    body = {"model": "tiny", "max_tokens": 1} | body
    assert client_for_all.post(path, json=body).status_code == 400
    with pytest.raises(ValidationError) as refusal:
        kinds[path].model_validate(body)
    assert "too_long" in {error["type"] for error in refusal.value.errors()} or name == "other documents"
    assert refusal.value.error_count() < 20


def test_more_ids_than_any_text_has_are_not_decoded(client_for_all):
    answer = client_for_all.post("/detokenize", json={"tokens": [1] * ((1 << 18) + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert client_for_all.post("/detokenize", json={"tokens": []}).status_code == 200


@pytest.mark.parametrize("name", list(MANY))
def test_a_million_mistakes_are_one_mistake(client_for_all, name):
    """Else one body of 4 MiB would hold up everybody for ten seconds and take gigabytes."""
    from pydantic import ValidationError

    from hasten.server.bodies import ChatBody
    from hasten.server.completions import CompletionBody

    body, path = MANY[name], "/v1/chat/completions" if "messages" in MANY[name] else "/v1/completions"
    assert client_for_all.post(path, json=body).status_code == 400
    if name in ("keys", "biases", "empty messages"):  # refused before, or after, the schema
        return
    with pytest.raises(ValidationError) as refusal:
        (ChatBody if "messages" in body else CompletionBody).model_validate(body)
    assert refusal.value.error_count() < 20


def test_headers_have_a_limit_however_they_arrive(engine):
    """uvicorn's own limit holds only for headers that come in several pieces."""
    with serving(app_of(engine)) as (url, _):
        for headers, path in (({"X-Long": "y" * 33_000}, "/health"), ({f"X-{i}": "y" * 90 for i in range(350)}, "/v1")):
            answer = httpx.get(f"{url}{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
        assert httpx.get(f"{url}/{'a' * 40_000}").status_code == 431
        assert httpx.get(f"{url}/health?{'a' * 40_000}").status_code == 431
        assert httpx.get(f"{url}/health", headers={"X-Long": "y" * 30_000}).status_code == 200
