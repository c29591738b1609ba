"""What today's clients expect of any server: lengths that are lowered, their own header for keys, timings, …"""

import json

import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from hasten import __version__
from server_case import PROMPT, app_of

CHAT = "/v1/chat/completions"
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_that_does_not_fit_is_lowered(client, engine, name):
    body = {"model": "tiny", "messages": TALK["messages"], name: 100_000}
    assert client.post(CHAT, json=body).status_code == 200
    request = engine.requests[-1]
    assert request.params.max_new_tokens == 4096 - len(request.prompt)
    if name == "max_tokens":
        assert client.post("/v1/completions", json=PROMPT | {name: 100_000}).status_code == 200
        assert engine.requests[-1].params.max_new_tokens == 4096 - len(engine.requests[-1].prompt)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_strict_length_refuses_it(engine, name):
    with TestClient(app_of(engine, strict_length=True), base_url="http://localhost") as client:
        body = {"model": "tiny", "messages": TALK["messages"], name: 100_000}
        error = client.post(CHAT, json=body).json()["error"]
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
        if name == "max_tokens":
            assert client.post("/v1/completions", json=PROMPT | {name: 100_000}).json()["error"]["param"] == name


def test_a_key_in_anthropics_header(tokenizer):
    with TestClient(app_of(FakeEngine(tokenizer), api_keys=("one",)), base_url="http://localhost") as client:
        for headers, status in (({"x-api-key": "one"}, 200), ({"x-api-key": "two"}, 401), ({"x-api-key": ""}, 401)):
            assert client.post("/v1/completions", json=PROMPT, headers=headers).status_code == status
        wrong = {"x-api-key": "one", "Authorization": "Bearer two"}
        assert client.post("/v1/completions", json=PROMPT, headers=wrong).status_code == 401


def test_whoever_asks_whether_a_server_listens_is_answered(tokenizer):
    engine = FakeEngine(tokenizer)
    with TestClient(app_of(engine, api_keys=("one",)), base_url="http://localhost") as client:
        assert client.head("/").status_code == 200
        for path in ("/", "/health", "/v1/health", "/ping"):
            assert client.get(path).json() == {"status": "ok"}
        assert client.get("/version").status_code == 401
        assert client.get("/version", headers={"x-api-key": "one"}).json() == {"version": __version__}
        engine.error = "a step failed"
        assert [client.get(path).status_code for path in ("/v1/health", "/ping")] == [503, 503]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), (CHAT, TALK)])
@pytest.mark.parametrize("asked", [{"n": 2, "use_beam_search": True}, {"n": 1, "best_of": 2}])
def test_texts_that_are_seen_at_the_end_have_no_timings(client, path, body, asked):
    answer = client.post(path, json=body | asked)
    assert answer.status_code == 200
    assert "timings" not in answer.json()
    assert answer.json()["usage"]["completion_tokens"] > 0
    if "best_of" not in asked:
        text = client.post(path, json=body | asked | {"stream": True, "stream_options": {"include_usage": True}}).text
        assert '"usage":{' in text
        assert "timings" not in text
    assert "timings" in client.post(path, json=body | {"n": 2}).json()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), (CHAT, TALK)])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_timings_are_llamacpps(client, path, body, options):
    whole = client.post(path, json=body).json()
    text = client.post(path, json=body | {"n": 2, "stream": True, "stream_options": options}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for found, tokens in ((whole["timings"], 3), (chunks[-1]["timings"], 6)):
        assert (found["cache_n"], found["predicted_n"]) == (1, tokens)
        assert found["prompt_n"] == whole["usage"]["prompt_tokens"] - 1
        assert found["prompt_ms"] > 0
        assert found["predicted_ms"] > 0
        assert found["predicted_per_second"] == pytest.approx(1000 * tokens / found["predicted_ms"])
