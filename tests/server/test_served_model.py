"""A tiny model behind the whole stack: what the server says is what the model says; nothing is left behind."""

import json
import socket
import threading
import time

import httpx
import openai
import pytest

import hasten
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation import make_speculator
from references import tiny_llama
from server_case import TOOL_TEMPLATE, app_of, serving

PROMPTS = ["def add", "for name in names:", "é ü 漢字", "print(f'"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(max_position_embeddings=512)
    model.tokenizer = model.tokenizer.with_chat_template(TOOL_TEMPLATE)
    return model


@pytest.fixture
def engine(model):
    settings = EngineSettings(max_sequences=8, token_budget=32, cache_bytes=1 << 20, queue_limit=6)
    return AsyncEngine(Engine(model, model.tokenizer, settings))


@pytest.fixture
def served(engine, model):
    with serving(app_of(engine, max_length=512)) as (url, _):
        yield url
        end = time.monotonic() + 10
        while not engine.engine.idle and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.engine.idle
        assert engine.stats().free_blocks == engine.stats().blocks
        engine.engine.check()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def greedy(model, prompt, tokens):
    return "".join(hasten.stream(model, prompt, temperature=0, max_new_tokens=tokens))


def test_the_answers_are_the_models(client, model):
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=20, temperature=0)
    assert [choice.text for choice in answer.choices] == [greedy(model, prompt, 20) for prompt in PROMPTS]
    stream = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=20, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == greedy(model, PROMPTS[0], 20)


def test_every_protocol_gives_the_same_answer(client, served, model):
    """The same conversation is the same prompt in each, so its text and its blocks in the prefix cache are too."""
    turns = [{"role": "system", "content": "You write code. " * 4}, {"role": "user", "content": "def add"}]
    chat = client.chat.completions.create(model="tiny", messages=turns, max_tokens=12, temperature=0)
    text = chat.choices[0].message.content
    assert text
    asked = {"instructions": turns[0]["content"], "input": turns[1]["content"], "max_output_tokens": 12}
    found = client.responses.create(model="tiny", temperature=0, **asked)
    assert found.output_text == text
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.input_tokens_details.cached_tokens > chat.usage.prompt_tokens // 2
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": turns[1:]}
    body["system"] = [billing, {"type": "text", "text": turns[0]["content"]}]
    for stream in (False, True):
        answer = httpx.post(f"{served}/v1/messages", json=body | {"stream": stream})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        pieces = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        assert ("".join(pieces) if stream else answer.json()["content"][0]["text"]) == text
        usage = events[0]["message"]["usage"] if stream else answer.json()["usage"]
        assert usage["cache_read_input_tokens"] == found.usage.input_tokens_details.cached_tokens
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
    options = {"options": {"temperature": 0, "num_predict": 12}}
    for stream in (False, True):
        answer = httpx.post(f"{served}/api/chat", json={"model": "tiny", "messages": turns, "stream": stream} | options)
        parts = [json.loads(line) for line in answer.text.splitlines()]
        assert "".join(part["message"]["content"] for part in parts) == text
        assert parts[-1]["prompt_eval_count"] == chat.usage.prompt_tokens


def test_answers_with_drafts_are_the_same_and_counted(engine, client, model, served):
    engine.engine.speculator = make_speculator(model, model)  # it draws for itself, so that its drafts are right
    engine.engine.speculator.always = True
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=20, temperature=0)
    assert [choice.text for choice in answer.choices] == [greedy(model, prompt, 20) for prompt in PROMPTS]
    told = dict(line.rsplit(" ", 1) for line in httpx.get(f"{served}/metrics").text.splitlines() if line[0] != "#")
    counted = {name: float(value) for name, value in told.items() if name.startswith("hasten:spec_decode_")}
    drafted, accepted = (
        counted[f'hasten:spec_decode_num_{name}_tokens_total{{model_name="tiny"}}'] for name in ("draft", "accepted")
    )
    assert 0 < accepted <= drafted
    places = [value for name, value in counted.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(places) == accepted


def test_seeds_and_samples(client):
    ask = {"model": "tiny", "prompt": "def", "max_tokens": 12, "seed": 5, "n": 3}
    first, again = (client.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    best = client.completions.create(**ask | {"n": 1, "best_of": 3})
    assert best.choices[0].text in texts


def test_a_clients_own_timeout_is_the_requests_deadline(client, engine):
    ask = {"model": "tiny", "prompt": "def", "max_tokens": 400, "n": 8, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).completions.create(**ask)
    end = time.monotonic() + 10
    while not (engine.stats().requests and engine.engine.idle) and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.stats().aborted == 1


def test_beam_search(client):
    ask = {"model": "tiny", "prompt": "def", "max_tokens": 8, "n": 2, "best_of": 4}
    answer = client.completions.create(**ask, extra_body={"use_beam_search": True, "ignore_eos": True})
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 2
    for wrong in ({"stop": ["x"]}, {"top_k": 3}, {"temperature": 0.5}):
        with pytest.raises(openai.BadRequestError, match="beam search"):
            client.completions.create(**ask, extra_body={"use_beam_search": True} | wrong)


def test_a_search_that_finds_too_few_texts_is_the_requests_fault(model):
    wanted = model.config.vocab_size + 2  # after one token there are no more texts than tokens
    settings = EngineSettings(max_sequences=wanted, token_budget=wanted, cache_bytes=4 << 20)
    engine = AsyncEngine(Engine(model, model.tokenizer, settings))
    with serving(app_of(engine, max_length=512, samples=wanted, choices=wanted)) as (url, _):
        body = {"model": "tiny", "prompt": "def", "max_tokens": 1, "n": wanted, "use_beam_search": True}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "n", "too_few_texts")
        assert f"of {wanted} texts" in error["message"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_logprobs_of_prompt_and_answer(client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[1], max_tokens=5, temperature=0, echo=True, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert "".join(found.tokens[: len(PROMPTS[1])]).startswith("for")
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())  # greedy


def test_structured_output_and_tools_hold_a_random_model(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    talk = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="tiny", messages=talk, response_format=form, n=4, seed=1)
    for choice in answer.choices:
        assert set(json.loads(choice.message.content)) == {"kind", "n"}
        assert choice.finish_reason == "stop"
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    forced = {"type": "function", "function": {"name": "pick"}}
    answer = client.chat.completions.create(model="tiny", messages=talk, tools=[tool], tool_choice=forced, seed=2)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["kind"] in ("a", "b")


def test_embeddings_are_unit_vectors_of_the_models_width(client):
    answer = client.embeddings.create(model="tiny", input=["def add", "def add", "é"])
    first, second, third = ([*entry.embedding] for entry in answer.data)
    assert len(first) == 64
    assert first == pytest.approx(second)
    assert first != pytest.approx(third)
    assert sum(x * x for x in first) == pytest.approx(1)


def test_prefixes_are_found_and_counted(client, served):
    prompt = list(range(40, 120))
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 64
    text = httpx.get(f"{served}/metrics").text
    found = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("hasten:")}
    assert found["hasten:prefix_cache_hits_total"] == 64
    assert found["hasten:num_requests_running"] == 0


def test_a_request_that_never_fits_and_a_full_queue(client, served):
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="tiny", prompt=list(range(40, 300)) * 2, max_tokens=5)
    statuses = []

    def ask():
        body = {"model": "tiny", "prompt": "def", "max_tokens": 50, "ignore_eos": True}
        answer = httpx.post(f"{served}/v1/completions", json=body, timeout=60)
        statuses.append((answer.status_code, answer.headers.get("retry-after")))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _ in statuses} == {200, 429}
    assert all(retry and int(retry) >= 1 for status, retry in statuses if status == 429)


def test_blocks_are_free_at_once_when_a_client_goes(served, engine):
    with socket.create_connection(served.removeprefix("http://").split(":")) as client:
        body = json.dumps({"model": "tiny", "prompt": "def", "max_tokens": 400, "ignore_eos": True, "n": 4}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        while engine.stats().running < 4:
            time.sleep(0.001)
    steps = engine.stats().steps
    while engine.stats().running:
        time.sleep(0.001)
    assert engine.stats().free_blocks == engine.stats().blocks
    assert engine.stats().steps - steps < 60  # of 400


def test_blocks_are_free_at_once_when_a_client_of_ollama_goes(served, engine):
    options = {"temperature": 0, "num_predict": 400}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "options": options}
    with httpx.stream("POST", f"{served}/api/chat", json=body) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + 10
    while engine.stats().running and time.monotonic() < end:
        time.sleep(0.001)
    assert engine.stats().aborted == 1
    assert engine.stats().free_blocks == engine.stats().blocks


def test_a_deadline_ends_a_request(model):
    settings = EngineSettings(max_sequences=8, token_budget=32, cache_bytes=1 << 20)
    engine = AsyncEngine(Engine(model, model.tokenizer, settings))
    with serving(app_of(engine, max_length=512, request_timeout=0.05)) as (url, _):
        body = {"model": "tiny", "prompt": "def", "max_tokens": 450, "ignore_eos": True, "n": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        answer = httpx.post(f"{url}/v1/completions", json=body | {"stream": True})
        *_, last, end = answer.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert end == "data: [DONE]"
        assert engine.stats().free_blocks == engine.stats().blocks


def test_a_model_that_fails_turns_health_red(model):
    settings = EngineSettings(max_sequences=8, token_budget=32, cache_bytes=1 << 20)
    engine = AsyncEngine(Engine(model, model.tokenizer, settings))
    with serving(app_of(engine, max_length=512)) as (url, _):
        body = {"model": "tiny", "prompt": "def", "max_tokens": 5}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        hook = model.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body)
        finally:
            hook.remove()
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_failed"
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
        assert engine.stats().free_blocks == engine.stats().blocks


def test_who_is_not_done_when_the_drain_ends_hears_why(model, monkeypatch):
    settings = EngineSettings(max_sequences=8, token_budget=32, cache_bytes=1 << 20)
    engine = AsyncEngine(Engine(model, model.tokenizer, settings))
    step = engine.engine.step
    monkeypatch.setattr(engine.engine, "step", lambda: (time.sleep(0.02), step())[1])
    with serving(app_of(engine, max_length=512, drain_timeout=0.2)) as (url, server):
        body = {"model": "tiny", "prompt": "def", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.handle_exit(15, None)
            *_, last, _, end, _ = lines
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert end == "data: [DONE]"
    assert engine.stats().free_blocks == engine.stats().blocks
    assert not engine.thread._readers
