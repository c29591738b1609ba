"""Keys, hosts, request ids, logs and metrics of the server; what it says of its own mistakes."""

import asyncio
import json

import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from hasten.errors import ConfigError
from hasten.server.guard import Guard
from hasten.server.logs import JsonLines
from hasten.server.settings import ServerSettings
from server_case import PROMPT, app_of


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer)


def test_keys(engine):
    with TestClient(app_of(engine, api_keys=("one", "two")), base_url="http://localhost") as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            assert client.get(path).status_code == 401
        for header in ("Bearer three", "Bearer ", "one", "Basic one", "Bearer one two", "Bearer \xe9"):
            answer = client.post("/v1/completions", json=PROMPT, headers={"Authorization": header.encode("latin-1")})
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
    assert len(engine.requests) == 2


def test_the_host_header_names_an_allowed_host(engine):
    app = app_of(engine, allowed_hosts=("localhost", "[::1]"))
    with TestClient(app, base_url="http://localhost") as client:
        for host, status in (("localhost:8000", 200), ("[::1]:1", 200), ("LOCALHOST", 200), ("evil.example", 403)):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_no_other_origin_is_invited(client_for_all):
    answer = client_for_all.options(
        "/v1/completions", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_pages_of_allowed_origins_may_ask(engine):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    with TestClient(app_of(engine, api_keys=("k",), allowed_origins=("https://App.example",))) as client:
        page = {"Origin": "https://app.example"}
        answer = client.options("/v1/chat/completions", headers=page | asks)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        body = PROMPT | {"no_such_field": 1}
        answer = client.post("/v1/completions", json=body, headers=page | {"Authorization": "Bearer k"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-hasten-ignored" in answer.headers["access-control-expose-headers"]
        assert client.post("/v1/completions", json=PROMPT, headers=page).status_code == 401
        other = {"Origin": "https://evil.example", "Authorization": "Bearer k"}
        assert client.options("/v1/completions", headers=other | asks).status_code == 400
        answer = client.post("/v1/completions", json=PROMPT, headers=other)
        assert "access-control-allow-origin" not in answer.headers
    with TestClient(app_of(engine, allowed_origins=("*",))) as client:
        assert client.get("/v1/models", headers={"Origin": "null"}).headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://", "http://a,http://b"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="an origin is a scheme and a host"):
        ServerSettings(allowed_origins=(origin,))


def test_request_ids_are_kept_if_they_are_harmless(client_for_all):
    def sent(name):
        return client_for_all.get("/health", headers={"X-Request-Id": name}).headers["x-request-id"]

    assert sent("a-1.b:c") == "a-1.b:c"
    for bad in ("a b", "x" * 200, "\x7f"):
        assert sent(bad).startswith("req-")


def test_logs_say_how_it_ended_and_nothing_of_what_was_said(engine, caplog):
    caplog.set_level("INFO", "hasten.server")
    with TestClient(app_of(engine, api_keys=("sesame",)), base_url="http://localhost") as client:
        headers = {"Authorization": "Bearer sesame", "X-Request-Id": "r1"}
        client.post("/v1/completions", json=PROMPT | {"prompt": "my secret", "user": "u\n7"}, headers=headers)
    (line,) = [JsonLines().format(record) for record in caplog.records if record.name == "hasten.server"]
    found = json.loads(line)
    assert "\n" not in line
    assert "secret" not in line
    assert "sesame" not in line
    assert (found["request_id"], found["status"], found["user"]) == ("r1", 200, "u\n7")
    assert found["completion_tokens"] == 3


def test_what_was_begun_is_ended_though_one_end_fails(engine):
    ended = []

    async def fail():
        raise RuntimeError("aclose(): asynchronous generator is already running")

    async def end():
        ended.append("it")

    async def begin(scope, receive, send):
        scope["state"]["cleanup"] += [fail, end]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(begin, app_of(engine).state.service)
    assert TestClient(guard, base_url="http://localhost").get("/v1/models").status_code == 204
    assert ended == ["it"]


@pytest.mark.parametrize("prompts", [1, 3])
def test_our_own_mistake_is_a_500_without_its_details_which_the_log_has(engine, prompts, caplog):
    engine.refusal = RuntimeError("something private")
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json=PROMPT | {"prompt": ["def"] * prompts})
    assert answer.status_code == 500
    assert "private" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
    (record,) = [one for one in caplog.records if one.getMessage() == "failed"]
    line = json.loads(JsonLines().format(record))
    assert line["error"] == "RuntimeError: something private"
    assert "Traceback" in line["traceback"]
    assert line["request_id"] == answer.headers["x-request-id"]


def test_health_is_red_when_the_engine_failed(engine):
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        engine.error = "step failed"
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        answer = client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers


def test_metrics_have_vllms_names(engine):
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        client.post("/v1/completions", json=PROMPT)
        text = client.get("/metrics").text
    wanted = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total "
        "prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total "
        "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_count "
        "request_prompt_tokens_sum request_generation_tokens_sum request_success_total "
        "spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total "
        "spec_decode_active spec_decode_tokens_per_step spec_decode_speedup"
    )
    for name in wanted.split():
        assert f"\nhasten:{name}{{" in text, name
    assert 'hasten:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'hasten:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
    assert 'hasten:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 2.0' in text


def test_times_are_counted_from_the_arrival(engine):
    app = app_of(engine)
    encode = app.state.service.encode

    async def slowly(*args, **kwargs):
        await asyncio.sleep(0.1)
        return await encode(*args, **kwargs)

    app.state.service.encode = slowly
    with TestClient(app, base_url="http://localhost") as client:
        client.post("/v1/completions", json=PROMPT)
        text = client.get("/metrics").text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        line = next(line for line in text.splitlines() if line.startswith(f"hasten:{name}_sum"))
        assert float(line.split()[-1]) >= 0.1
