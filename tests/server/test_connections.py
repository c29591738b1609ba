"""Clients that go away, do not read or do not write; the orderly end."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from server_case import POST, PROMPT, app_of, read_to_end, serving, wait_until


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_goes_away_is_aborted(engine, stream, prompts):
    engine.endless, engine.delay = True, 0.005
    body = PROMPT | {"max_tokens": 400, "stream": stream, "prompt": ["def"] * prompts}
    with serving(app_of(engine)) as (url, _):
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
    app = app_of(engine, max_length=10_000_000, write_timeout=0.3)
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


def test_headers_and_bodies_must_arrive_in_time(engine, monkeypatch):
    from hasten.server import server as module

    monkeypatch.setattr(module._Protocol, "header_timeout", 0.2)
    with serving(app_of(engine, body_timeout=0.2)) as (url, _):
        address = url.removeprefix("http://").split(":")
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
            assert read_to_end(client) == b""
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(POST % 9 + b"{")
            assert read_to_end(client)[9:12] == b"408"
        with socket.create_connection(address, timeout=10) as client:  # headers without an end
            client.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000)
            assert read_to_end(client)[9:12] in (b"", b"400")


def test_keep_alive_is_not_cut_by_the_header_timeout(engine, monkeypatch):
    from hasten.server import server as module

    monkeypatch.setattr(module._Protocol, "header_timeout", 0.1)
    engine.delay = 0.1
    with serving(app_of(engine)) as (url, _), httpx.Client(base_url=url) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=PROMPT).status_code == 200  # takes 0.3 s
            time.sleep(0.2)


def test_a_shutdown_lets_requests_end_and_takes_no_more(engine):
    engine.delay = 0.05
    results = {}
    with serving(app_of(engine)) as (url, server):

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


def test_a_shutdown_ends_what_takes_too_long(engine):
    engine.endless, engine.delay = True, 0.01
    with serving(app_of(engine, max_length=10**7, drain_timeout=1.0)) as (url, server):
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


def test_while_draining_nothing_new_is_taken(engine):
    app = app_of(engine)
    with TestClient(app, base_url="http://localhost") as client:
        app.state.service.draining = True
        answer = client.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503


def test_no_task_is_left(engine):
    """Many requests of every kind of end, in one loop: afterwards only the test itself runs."""
    engine.delay = 0.001

    async def storm():
        transport = httpx.ASGITransport(app_of(engine))
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


def test_while_it_drains_the_server_still_says_so(engine):
    engine.endless, engine.delay = True, 0.05
    results = {}
    with serving(app_of(engine, drain_timeout=3600.0)) as (url, server):

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


def test_a_second_signal_ends_at_once(engine):
    engine.endless, engine.delay = True, 0.01
    with serving(app_of(engine, max_length=10**7, drain_timeout=3600.0)) as (url, server):
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
