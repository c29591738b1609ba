"""The page at `/`: who gets it and how, and the live stream beside it; what a browser does with them: tests/page."""

import asyncio
import base64
import json
import math
import re
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.watch import CACHED, FIRST_MARK, FREE, Watch
from hasten.machine.bandwidth import keep_bandwidth, known_bandwidth
from hasten.server.live import Live
from hasten.server.metrics import Metrics, median
from hasten.server.page import FOLDER, KINDS
from references import tiny_llama
from server_case import app_of, serving, wait_until
from serving_cases import make_engine, request

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PATHS = {"index.html": "/", "app.js": "/page/app.js", "app.css": "/page/app.css"}


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def slow_engine(model, blocks):
    """An engine whose answers take long enough to be seen in several events."""
    engine = AsyncEngine(make_engine(model, blocks=blocks))
    step = engine.engine.step
    engine.engine.step = lambda: (time.sleep(0.01), step())[1]
    return engine


@pytest.fixture
def engine(model):
    return slow_engine(model, 64)


# -- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_browser_gets_the_files_with_strict_headers(client_for_all, name):
    answer = client_for_all.get(PATHS[name], headers=HTML)
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == f"{KINDS[name]}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("name", KINDS)
def test_what_a_browser_has_is_not_sent_again(client_for_all, name):
    tag = client_for_all.get(PATHS[name], headers=HTML).headers["etag"]
    for known, status in ((tag, 304), (f'"x", W/{tag}', 304), ('"x"', 200)):
        answer = client_for_all.get(PATHS[name], headers={**HTML, "if-none-match": known})
        assert (answer.status_code, answer.headers["etag"], answer.content == b"") == (status, tag, status == 304)


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_clients_that_are_no_browsers_hear_that_a_server_listens(client_for_all, accept):
    answer = client_for_all.get("/", headers={"accept": accept})
    assert answer.json() == {"status": "ok"}
    assert answer.headers["vary"] == "Accept"
    assert client_for_all.head("/", headers=HTML).headers["content-type"] == "application/json"


def test_the_page_can_be_left_out(tokenizer):
    with TestClient(app_of(FakeEngine(tokenizer), page=False), base_url="http://localhost") as client:
        assert client.get("/", headers=HTML).json() == {"status": "ok"}
        assert [client.get(path, headers=HTML).status_code for path in list(PATHS.values())[1:]] == [404, 404]


def test_the_files_need_no_key_and_the_stream_does(tokenizer):
    with TestClient(app_of(FakeEngine(tokenizer), api_keys=("one",)), base_url="http://localhost") as client:
        assert {client.get(path, headers=HTML).status_code for path in PATHS.values()} == {200}
        assert client.get("/v1/hasten/live").status_code == 401


def test_the_files_load_nothing_from_elsewhere_and_hold_no_inline_code():
    html = (FOLDER / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', html)) == {"/page/app.css", "/page/app.js"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src)", html)
    script = (FOLDER / "app.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?:", script)
    assert "http" not in (FOLDER / "app.css").read_text()
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([^"]+)"\)', script)) <= set(ids)


# -- the live stream --------------------------------------------------------------------------------------------------


@contextmanager
def following(url, *, key=None):
    """The events of the live stream as they come."""
    headers = {} if key is None else {"x-api-key": key}
    with httpx.stream("GET", f"{url}/v1/hasten/live", headers=headers, timeout=20) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        yield (json.loads(line) for line in lines if line != "[DONE]")


def ask(url, **fields):
    """A request that runs beside the test; returns its thread."""
    body = {"model": "tiny", "prompt": "def add(a, b): return", "ignore_eos": True} | fields
    thread = threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    thread.start()
    return thread


def test_the_stream_shows_shared_copied_and_cached_blocks(engine):
    with serving(app_of(engine, max_length=512)) as (url, _), following(url) as events:
        first = next(events)
        assert first["model"] == "tiny"
        assert {"block", "attention"} <= {entry["part"].split(",")[0] for entry in first["kernels"]}
        assert all(entry["kernel"] and entry["why"] for entry in first["kernels"])
        empty = {"size": 4, "total": 64, "free": 64, "map": "", "shared": [], "copied": []}
        assert first["blocks"] == empty
        thread = ask(url, n=4, max_tokens=40)
        seen = []
        for event in events:
            assert "kernels" not in event
            seen.append(event)
            marks = base64.b64decode(event["blocks"]["map"])
            assert sum(mark >= FIRST_MARK for mark in marks) == 64 - event["blocks"]["free"]
            if not event["sequences"] and any(one["sequences"] for one in seen):
                break
        thread.join()
    shared = [owners for event in seen for _, owners in event["blocks"]["shared"]]
    assert max(shared) == 4
    assert sum(len(event["blocks"]["copied"]) for event in seen) == engine.stats().copied_blocks > 0
    assert max(len(event["sequences"]) for event in seen) == 4
    assert max(event["rates"]["generation"] for event in seen) > 0
    assert max(event["queue"]["running"] for event in seen) == 4
    assert CACHED in base64.b64decode(seen[-1]["blocks"]["map"])
    assert seen[-1]["latency"]["ttft_p50"] > 0


def test_nothing_is_recorded_when_nobody_watches(engine):
    app = app_of(engine, max_length=512)
    with serving(app) as (url, _):
        assert engine.engine.on_copies is None
        with following(url) as one, following(url) as two:
            next(one), next(two)
            assert engine.engine.on_copies is not None
        wait_until(lambda: engine.engine.on_copies is None)
        wait_until(lambda: app.state.service.in_flight == 0)
        with following(url) as events:  # and it begins again
            assert next(events)["kernels"]


def test_a_drained_server_ends_the_stream(engine):
    with serving(app_of(engine, max_length=512, drain_timeout=20)) as (url, server), following(url) as events:
        next(events)
        begun = time.monotonic()
        server.handle_exit(15, None)
        assert len(list(events)) < 8
        assert time.monotonic() - begun < 5


def test_an_engine_that_fails_is_an_error(engine):
    with serving(app_of(engine, max_length=512)) as (url, _):
        with following(url) as events:
            next(events)
            engine.thread.close()
            *_, last = events
            assert "closed" in last["error"]["message"]
        assert httpx.get(f"{url}/v1/hasten/live").status_code == 503


def test_an_engine_whose_blocks_are_elsewhere_has_no_map(client_for_all, tokenizer):
    with serving(app_of(FakeEngine(tokenizer))) as (url, _), following(url) as events:
        first = next(events)
    assert (first["blocks"], first["kernels"], first["sequences"], first["machine"]) == (None, [], [], None)
    assert first["queue"] == {"running": 0, "waiting": 0}


def test_one_task_serves_all_watchers_and_an_error_reaches_them(tokenizer):
    engine = FakeEngine(tokenizer)
    service = app_of(engine).state.service

    async def check():
        live = Live(service)
        one, two = live.events(), live.events()
        first = await asyncio.gather(anext(one), anext(two))
        assert first[0] == first[1]
        engine.replica_stats = lambda: 1 / 0
        await asyncio.sleep(0.6)  # both hear of it who were not waiting when it happened
        for events in (one, two):
            with pytest.raises(ZeroDivisionError):
                await anext(events)
        del engine.replica_stats
        assert (await anext(live.events()))["t"]

    asyncio.run(check())
    service.close()


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_what_the_block_manager_says(model):
    engine = make_engine(model, blocks=32)
    watch = Watch(engine)
    assert watch.look().marks == b""
    engine.add(request("a", range(40, 50), max_new_tokens=9, n=3))
    copied = []
    while not engine.idle:
        engine.step()
        found, stats = watch.look(), engine.stats()
        copied += found.copied
        assert (found.blocks, found.free, found.block_size) == (32, stats.free_blocks, 4)
        assert len(found.shared) == stats.shared_blocks
        assert sum(mark >= FIRST_MARK for mark in found.marks) == stats.used_blocks
        assert [one.number for one in found.sequences] == [one.number for one in engine.scheduler.running]
        for one in engine.scheduler.running:
            alone = set(engine.blocks.table(one.number).own) - {block for block, _ in found.shared}
            assert {found.marks[block] for block in alone} <= {FIRST_MARK + one.number}
        cached = set(engine.blocks.cached.values())
        assert {block for block, mark in enumerate(found.marks) if mark == CACHED} <= cached
        assert (found.step_bytes > 0) == bool(found.sequences)
    assert len(copied) == engine.stats().copied_blocks == 2
    assert set(watch.look().marks) == {FREE, CACHED} or set(watch.look().marks) == {CACHED}
    Watch(engine)
    watch.end()
    assert engine.on_copies is not None  # the other one's


def test_a_step_is_at_least_its_weights(model):
    engine = make_engine(model)
    watch = Watch(engine)
    engine.add(request("a", range(40, 50), max_new_tokens=9))
    engine.step()
    one = watch.look().step_bytes
    engine.add(request("b", range(60, 90), max_new_tokens=9))
    for _ in range(3):
        engine.step()
    both = watch.look().step_bytes
    weights = sum(
        module.weight.nbytes
        for part in (model.blocks, model.head)
        for module in part.modules()
        if isinstance(module, torch.nn.Linear)
    )
    assert weights < one < both < 2 * weights


# -- what it shows ----------------------------------------------------------------------------------------------------


def test_the_median_lies_in_its_bucket():
    metrics = Metrics("tiny", dict)
    assert median(metrics.first) is None
    for seconds in (0.3, 0.4, 0.45, 3.0):
        metrics.first.observe(seconds)
    assert 0.25 <= median(metrics.first) <= 0.5
    metrics.between.observe(1000)  # beyond the last bucket
    assert median(metrics.between) == 40


def test_the_bandwidth_is_the_doctors_and_never_measured_while_serving(monkeypatch, tmp_path):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setenv("HASTEN_MEASURE", "1")
    cpu = torch.device("cpu")
    assert known_bandwidth(cpu) is None
    keep_bandwidth(2.5e10)
    keep_bandwidth(3e10)
    assert math.isclose(known_bandwidth(cpu), 3e10)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert known_bandwidth(cpu) is None
    finally:
        torch.set_num_threads(before)
    monkeypatch.setenv("HASTEN_MEASURE", "0")
    assert known_bandwidth(cpu) is None


def test_the_share_of_the_bandwidth_is_bytes_of_steps_over_time(model, monkeypatch):
    monkeypatch.setattr("hasten.engine.watch.known_bandwidth", lambda device: 1e9)
    engine = slow_engine(model, 200)
    with serving(app_of(engine, max_length=512)) as (url, _), following(url) as events:
        next(events)
        thread = ask(url, max_tokens=200)
        found = [next(events) for _ in range(8)]
        thread.join()
    shares = [event["rates"]["mbu"] for event in found if event["sequences"]]
    speeds = [event["rates"]["generation"] for event in found if event["sequences"]]
    weights = model.head.weight.nbytes
    assert any(share and share > speed * weights / 1e9 for share, speed in zip(shares, speeds, strict=True))
