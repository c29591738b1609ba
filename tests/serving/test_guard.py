"""What strangers send, clients that go away or do not read, keys, limits, the orderly end."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from server_case import app_of, serving

PROMPT = {"model": "tiny", "prompt": "def", "max_tokens": 3}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def tokenizer():
    from references import tiny_llama

    return tiny_llama().tokenizer


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer)


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def _end(client):
    """What the server sends until it closes."""
    received = b""
    try:
        while data := client.recv(4096):
            received += data
    except ConnectionError:
        pass
    return received


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
def test_hostile_bodies_are_refused_with_a_reason(client_for_all, path, body):
    answer = client_for_all.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text[:200]
    assert answer.json()["error"]["message"]
    assert len(answer.text) < 3000


@pytest.fixture(scope="module")
def client_for_all(tokenizer):
    with TestClient(app_of(FakeEngine(tokenizer), tokenizer), base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read(client_for_all, kind):
    """Else a web page could send requests to a server on its reader's machine without being asked."""
    answer = client_for_all.post("/v1/completions", content=json.dumps(PROMPT), headers={"Content-Type": kind})
    assert answer.status_code == 415


def test_bodies_have_a_limit(engine, tokenizer):
    with TestClient(app_of(engine, tokenizer, body_bytes=1000), base_url="http://localhost") as client:
        big = PROMPT | {"prompt": "x" * 2000}
        assert client.post("/v1/completions", json=big).status_code == 413

        def pieces():
            for _ in range(20):
                yield b"x" * 100

        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=pieces(), headers=headers).status_code == 413
        assert client.post("/v1/completions", json=PROMPT).status_code == 200


def test_keys(engine, tokenizer):
    with TestClient(app_of(engine, tokenizer, api_keys=("one", "two")), base_url="http://localhost") as client:
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


def test_the_host_header_names_an_allowed_host(engine, tokenizer):
    app = app_of(engine, tokenizer, allowed_hosts=("localhost", "[::1]"))
    with TestClient(app, base_url="http://localhost") as client:
        for host, status in (("localhost:8000", 200), ("[::1]:1", 200), ("LOCALHOST", 200), ("evil.example", 403)):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_no_other_origin_is_invited(client_for_all):
    answer = client_for_all.options(
        "/v1/completions", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_request_ids_are_kept_if_they_are_harmless(client_for_all):
    def sent(name):
        return client_for_all.get("/health", headers={"X-Request-Id": name}).headers["x-request-id"]

    assert sent("a-1.b:c") == "a-1.b:c"
    for bad in ("a b", "x" * 200, "\x7f"):
        assert sent(bad).startswith("req-")


def test_logs_say_how_it_ended_and_nothing_of_what_was_said(engine, tokenizer, caplog):
    caplog.set_level("INFO", "hasten.serving")
    with TestClient(app_of(engine, tokenizer, api_keys=("sesame",)), base_url="http://localhost") as client:
        headers = {"Authorization": "Bearer sesame", "X-Request-Id": "r1"}
        client.post("/v1/completions", json=PROMPT | {"prompt": "my secret", "user": "u\n7"}, headers=headers)
    from hasten.serving.api.logs import JsonLines

    (line,) = [JsonLines().format(record) for record in caplog.records if record.name == "hasten.serving"]
    found = json.loads(line)
    assert "\n" not in line
    assert "secret" not in line
    assert "sesame" not in line
    assert (found["request_id"], found["status"], found["user"]) == ("r1", 200, "u\n7")
    assert found["completion_tokens"] == 3


@pytest.mark.parametrize("prompts", [1, 3])
def test_our_own_mistake_is_a_500_without_its_details(engine, tokenizer, prompts):
    engine.refusal = RuntimeError("something private")
    with TestClient(app_of(engine, tokenizer), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json=PROMPT | {"prompt": ["def"] * prompts})
    assert answer.status_code == 500
    assert "private" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"


def test_health_is_red_when_the_engine_failed(engine, tokenizer):
    with TestClient(app_of(engine, tokenizer), base_url="http://localhost") as client:
        engine.error = "step failed"
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        answer = client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers


def test_metrics_have_vllms_names(engine, tokenizer):
    with TestClient(app_of(engine, tokenizer), base_url="http://localhost") as client:
        client.post("/v1/completions", json=PROMPT)
        text = client.get("/metrics").text
    wanted = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total "
        "prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total "
        "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_count "
        "request_prompt_tokens_sum request_generation_tokens_sum request_success_total"
    )
    for name in wanted.split():
        assert f"\nhasten:{name}{{" in text, name
    assert 'hasten:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'hasten:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text


def test_times_are_counted_from_the_arrival(engine, tokenizer):
    app = app_of(engine, tokenizer)
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_goes_away_is_aborted(engine, tokenizer, stream, prompts):
    engine.endless, engine.delay = True, 0.005
    body = PROMPT | {"max_tokens": 400, "stream": stream, "prompt": ["def"] * prompts}
    with serving(app_of(engine, tokenizer)) as (url, _):
        with socket.create_connection(url.removeprefix("http://").split(":")) as client:
            data = json.dumps(body).encode()
            client.sendall(POST % len(data) + data)
            wait_until(lambda: len(engine.running) == prompts)
            if stream:
                assert client.recv(10) == b"HTTP/1.1 2"
        wait_until(lambda: not engine.running)
    assert len(engine.aborted) == prompts


def test_a_reader_that_does_not_read_is_dropped(engine, tokenizer):
    engine.endless = True
    engine.answer = tokenizer.encode("x" * 50, add_special_tokens=False)
    app = app_of(engine, tokenizer, max_length=10_000_000, write_timeout=0.3)
    with serving(app) as (url, server):
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((host, int(port)))
            data = json.dumps(PROMPT | {"max_tokens": 5_000_000, "stream": True}).encode()
            client.sendall(POST % len(data) + data)
            wait_until(lambda: engine.running)
            wait_until(lambda: not engine.running, 20)
            wait_until(lambda: not server.server_state.connections)
    assert len(engine.aborted) == 1


def test_headers_and_bodies_must_arrive_in_time(engine, tokenizer, monkeypatch):
    from hasten.serving.api import server as module

    monkeypatch.setattr(module._Protocol, "header_timeout", 0.2)
    with serving(app_of(engine, tokenizer, body_timeout=0.2)) as (url, _):
        address = url.removeprefix("http://").split(":")
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
            assert _end(client) == b""
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(POST % 9 + b"{")
            assert _end(client)[9:12] == b"408"
        with socket.create_connection(address, timeout=10) as client:  # headers without an end
            client.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000)
            assert _end(client)[9:12] in (b"", b"400")


def test_keep_alive_is_not_cut_by_the_header_timeout(engine, tokenizer, monkeypatch):
    from hasten.serving.api import server as module

    monkeypatch.setattr(module._Protocol, "header_timeout", 0.1)
    engine.delay = 0.1
    with serving(app_of(engine, tokenizer)) as (url, _), httpx.Client(base_url=url) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=PROMPT).status_code == 200  # takes 0.3 s
            time.sleep(0.2)


def test_a_shutdown_lets_requests_end_and_takes_no_more(engine, tokenizer):
    engine.delay = 0.05
    results = {}
    with serving(app_of(engine, tokenizer)) as (url, server):

        def ask():
            results["answer"] = httpx.post(f"{url}/v1/completions", json=PROMPT | {"max_tokens": 12})

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: engine.running)
        server.handle_exit(15, None)
        thread.join(10)
        assert results["answer"].status_code == 200
        wait_until(lambda: engine.closed)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    assert not engine.aborted


def test_a_shutdown_ends_what_takes_too_long(engine, tokenizer):
    engine.endless, engine.delay = True, 0.01
    with serving(app_of(engine, tokenizer, max_length=10**7, drain_timeout=1.0)) as (url, server):
        body = PROMPT | {"max_tokens": 10**6, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.handle_exit(15, None)
            with pytest.raises(httpx.HTTPError):
                for _ in lines:
                    pass
        wait_until(lambda: engine.closed)
    assert not engine.running


def test_while_draining_nothing_new_is_taken(engine, tokenizer):
    app = app_of(engine, tokenizer)
    with TestClient(app, base_url="http://localhost") as client:
        app.state.service.draining = True
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503


def test_no_task_is_left(engine, tokenizer):
    """Many requests of every kind of end, in one loop: afterwards only the test itself runs."""
    engine.delay = 0.001

    async def storm():
        transport = httpx.ASGITransport(app_of(engine, tokenizer))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def one(number):
                body = PROMPT | {"stream": number % 2 == 0, "prompt": ["a"] * (1 + number % 3), "max_tokens": 10}
                call = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.sleep(0.002 * (number % 7))
                if number % 3 == 0:
                    call.cancel()
                await asyncio.gather(call, return_exceptions=True)

            await asyncio.gather(*(one(number) for number in range(40)))
        await asyncio.sleep(0.05)
        return len(asyncio.all_tasks())

    assert asyncio.run(storm()) == 1
    assert not engine.running


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


@pytest.mark.parametrize("name", list(TOO_MANY))
def test_too_many_are_refused_before_each_is_looked_at(client_for_all, name):
    """What is checked after the schema has held the event loop while all of it became objects."""
    from pydantic import ValidationError

    from hasten.serving.api.completions import CompletionBody
    from hasten.serving.api.conversation import ChatBody

    body = {"model": "tiny"} | TOO_MANY[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = client_for_all.post(path, json=body)
    field = next(field for field in ("stop", "prompt", "tools", "messages") if field in body)
    assert (answer.status_code, answer.json()["error"]["param"].split("[")[0]) == (400, field)
    with pytest.raises(ValidationError) as refusal:
        (ChatBody if "messages" in body else CompletionBody).model_validate(body)
    assert "too_long" in {error["type"] for error in refusal.value.errors()}


def test_more_ids_than_any_text_has_are_not_decoded(client_for_all):
    answer = client_for_all.post("/detokenize", json={"tokens": [1] * ((1 << 18) + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert client_for_all.post("/detokenize", json={"tokens": []}).status_code == 200


@pytest.mark.parametrize("name", list(MANY))
def test_a_million_mistakes_are_one_mistake(client_for_all, name):
    """Else one body of 4 MiB would hold up everybody for ten seconds and take gigabytes."""
    from pydantic import ValidationError

    from hasten.serving.api.completions import CompletionBody
    from hasten.serving.api.conversation import ChatBody

    body, path = MANY[name], "/v1/chat/completions" if "messages" in MANY[name] else "/v1/completions"
    assert client_for_all.post(path, json=body).status_code == 400
    if name in ("keys", "biases", "empty messages"):  # refused before, or after, the schema
        return
    with pytest.raises(ValidationError) as refusal:
        (ChatBody if "messages" in body else CompletionBody).model_validate(body)
    assert refusal.value.error_count() < 20


def test_headers_have_a_limit_however_they_arrive(engine, tokenizer):
    """uvicorn's own limit holds only for headers that come in several pieces."""
    with serving(app_of(engine, tokenizer)) as (url, _):
        for headers, path in (({"X-Long": "y" * 33_000}, "/health"), ({f"X-{i}": "y" * 90 for i in range(350)}, "/v1")):
            answer = httpx.get(f"{url}{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
        assert httpx.get(f"{url}/{'a' * 40_000}").status_code == 431
        assert httpx.get(f"{url}/health?{'a' * 40_000}").status_code == 431
        assert httpx.get(f"{url}/health", headers={"X-Long": "y" * 30_000}).status_code == 200


def test_while_it_drains_the_server_still_says_so(engine, tokenizer):
    engine.endless, engine.delay = True, 0.05
    results = {}
    with serving(app_of(engine, tokenizer, drain_timeout=3600.0)) as (url, server):

        def ask():
            results["answer"] = httpx.post(f"{url}/v1/completions", json=PROMPT | {"max_tokens": 2000}, timeout=200)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: engine.running)
        server.handle_exit(15, None)
        for path, status in (("/health", 200), ("/ready", 503), ("/metrics", 200), ("/v1/models", 503)):
            assert httpx.get(f"{url}{path}").status_code == status, path  # each over a connection of its own
        answer = httpx.post(f"{url}/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert engine.running, "all that was while it drained"
        engine.delay = 0.0  # until here it would have taken 100 s, however busy the machine is
        thread.join(60)
        assert results["answer"].status_code == 200
        wait_until(lambda: engine.closed)


def test_a_second_signal_ends_at_once(engine, tokenizer):
    engine.endless, engine.delay = True, 0.01
    with serving(app_of(engine, tokenizer, max_length=10**7, drain_timeout=3600.0)) as (url, server):
        body = PROMPT | {"max_tokens": 10**6, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.handle_exit(15, None)
            next(lines)
            server.handle_exit(15, None)
            with pytest.raises(httpx.HTTPError):
                for _ in lines:
                    pass
