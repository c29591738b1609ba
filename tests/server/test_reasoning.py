"""Reasoning and calls of a template that none of the known formats is, in every protocol; budgets; what comes after."""

import dataclasses
import json
import pickle

import pytest
import tokenizers
import torch
from starlette.testclient import TestClient

from answer_templates import TEMPLATES, template
from fake_engine import FakeEngine
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.replicas.replica import packed
from hasten.server.reasoning import AfterReasoning, gate_of
from hasten.text.answer_format import find_answer_format
from server_case import app_of

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
THOUGHT = "Hm, so.\n</think>\n\n"
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
ARGUMENTS = {"city": "Rome", "days": 3}


@pytest.fixture(scope="module")
def engine(tokenizer):
    return FakeEngine(tokenizer.with_chat_template(TEMPLATES["parameters"]))


@pytest.fixture(autouse=True)
def as_new(engine):
    yield
    engine.insists = False
    engine.requests.clear()


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        yield client


def say(engine, text, *, insists=False):
    engine.answer = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.insists = insists


def ask(client, path="/v1/chat/completions", **fields):
    answer = client.post(path, json=ASK | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client, path="/v1/chat/completions", **fields):
    answer = client.post(path, json=ASK | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_chat_answer_has_its_reasoning_apart(client, engine):
    say(engine, f"{THOUGHT}Hello.")
    found = ask(client)
    message, usage = found["choices"][0]["message"], found["usage"]
    assert (message["content"], message["reasoning_content"]) == ("Hello.", "Hm, so.")
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    thought = len(engine.tokenizer.encode("Hm, so.", add_special_tokens=False))
    assert thought < reasoning < usage["completion_tokens"]
    chunks = stream(client)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello."


def test_reasoning_that_is_turned_off(client, engine):
    say(engine, "Hello.")
    found = ask(client, reasoning_effort="none")
    message = found["choices"][0]["message"]
    assert message["content"] == "Hello."
    assert "reasoning_content" not in message
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_call_in_the_templates_own_format(client, engine):
    say(engine, f"{THOUGHT}I look.{CALL}")
    choice = ask(client, tools=[TOOL])["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm, so.")
    assert choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", ARGUMENTS)


def test_arguments_are_streamed_as_they_come(client, engine):
    say(engine, f"{THOUGHT}{CALL}")
    chunks = stream(client, tools=[TOOL])
    pieces = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == "weather"
    assert [set(piece) for piece in pieces[1:]] == [{"index", "function"}] * (len(pieces) - 1)
    assert len(pieces) > 3
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_where_calls_are_not_parallel(client, engine):
    say(engine, f"{THOUGHT}{CALL}\n{CALL}")
    assert len(ask(client, tools=[TOOL])["choices"][0]["message"]["tool_calls"]) == 2
    (call,) = ask(client, tools=[TOOL], parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_an_answer_that_is_cut_in_its_reasoning_and_in_a_call(client, engine):
    say(engine, f"{THOUGHT}{CALL}")
    choice = ask(client, tools=[TOOL], max_tokens=2)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert "Hm, so.".startswith(choice["message"]["reasoning_content"])
    room = len(engine.tokenizer.encode(f"{THOUGHT}{CALL[: CALL.index('ome')]}", add_special_tokens=False))
    choice = ask(client, tools=[TOOL], max_tokens=room)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert call["function"]["arguments"].startswith('{"city": "R')


RESPONSES = {"model": "tiny", "input": "hi"}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}


def responses(client, **fields):
    answer = client.post("/v1/responses", json=RESPONSES | fields)
    assert answer.status_code == 200, answer.text
    return answer


def test_items_of_a_response(client, engine):
    say(engine, f"{THOUGHT}I look.{CALL}")
    found = responses(client, tools=[RESPONSES_TOOL]).json()
    reasoning, message, call = found["output"]
    assert (reasoning["type"], reasoning["summary"], reasoning["status"]) == ("reasoning", [], "completed")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
    assert reasoning["id"].startswith("rs_")
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("weather", ARGUMENTS, "completed")
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    responses(client, previous_response_id=found["id"], input=[output], tools=[RESPONSES_TOOL])
    shown = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert "<think>\nHm, so.\n</think>" in shown
    assert "<parameter=city>\nRome\n" in shown


def test_events_of_a_response(client, engine):
    say(engine, f"{THOUGHT}I look.{CALL}")
    text = responses(client, tools=[RESPONSES_TOOL], stream=True).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    order = list(dict.fromkeys(kinds))
    assert order.index("reasoning_text.delta") < order.index("reasoning_text.done") < order.index("output_text.delta")
    assert order.index("output_text.done") < order.index("function_call_arguments.delta")
    arguments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert len(arguments) > 2
    assert json.loads("".join(arguments)) == ARGUMENTS
    reasoning = "".join(event["delta"] for event in events if event["type"].endswith("reasoning_text.delta"))
    assert reasoning == "Hm, so."
    added = [event["item"]["type"] for event in events if event["type"].endswith("item.added")]
    assert added == ["reasoning", "message", "function_call"]
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == events[-1]["response"]["output"]


def test_a_custom_tool_has_its_input_at_its_end(client, engine):
    call = CALL.replace("city", "input").replace("<parameter=days>\n3\n</parameter>\n", "")
    say(engine, f"{THOUGHT}{call}")
    tool = {"type": "custom", "name": "weather"}
    assert responses(client, tools=[tool]).json()["output"][-1]["input"] == "Rome"
    text = responses(client, tools=[tool], stream=True).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["Rome"]


MESSAGES_TOOL = {"name": "weather", "input_schema": SCHEMA}


def test_blocks_of_a_message(client, engine):
    say(engine, f"{THOUGHT}I look.{CALL}")
    found = ask(client, "/v1/messages", tools=[MESSAGES_TOOL])
    thinking, text, call = found["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm, so.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (call["name"], call["input"], found["stop_reason"]) == ("weather", ARGUMENTS, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    turns = [*ASK["messages"], {"role": "assistant", "content": found["content"]}]
    ask(client, "/v1/messages", messages=[*turns, {"role": "user", "content": [result]}], tools=[MESSAGES_TOOL])
    shown = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert "<think>\nHm, so.\n</think>\n\nI look.<tool_call>\n<function=weather>" in shown


def test_events_of_a_message(client, engine):
    say(engine, f"{THOUGHT}I look.{CALL}")
    events = stream(client, "/v1/messages", tools=[MESSAGES_TOOL])
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm, so."
    assert [delta["type"] for delta in deltas].count("signature_delta") == 1
    arguments = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert len(arguments) > 2
    assert json.loads("".join(arguments)) == ARGUMENTS
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


# -- budgets and structures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_ends_the_reasoning(client, engine, budget):
    say(engine, "one two three four five six", insists=True)
    ids = engine.answer
    found = ask(client, thinking_budget_tokens=budget)
    message = found["choices"][0]["message"]
    thought, rest = (engine.tokenizer.decode(part).strip() for part in (ids[:budget], ids[budget:]))
    assert (message.get("reasoning_content", ""), message["content"].strip()) == (thought, rest)


def test_a_reasoning_within_its_budget_ends_by_itself(client, engine):
    say(engine, f"{THOUGHT}Hello.", insists=True)
    message = ask(client, thinking_budget_tokens=50)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello.", "Hm, so.")


def test_the_budget_of_a_message(client, engine):
    say(engine, "one two three four five six", insists=True)
    found = ask(client, "/v1/messages", thinking={"type": "enabled", "budget_tokens": 2})
    thinking, text = found["content"]
    assert thinking["thinking"] == engine.tokenizer.decode(engine.answer[:2]).strip()
    assert text["text"].strip() == engine.tokenizer.decode(engine.answer[2:]).strip()


def test_a_budget_needs_a_template_that_reasons(engine):
    silent = FakeEngine(engine.tokenizer.with_chat_template(template("", REASONING="")))
    with TestClient(app_of(silent), base_url="http://localhost") as client:
        answer = client.post("/v1/chat/completions", json=ASK | {"thinking_budget_tokens": 3})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "thinking_budget_tokens"


OBJECT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_structured_output_comes_after_the_reasoning(client, engine):
    say(engine, 'Hm {"a": so.</think>{"city": "Rome"}', insists=True)
    message = ask(client, response_format=OBJECT)["choices"][0]["message"]
    assert message["reasoning_content"] == 'Hm {"a": so.'
    assert json.loads(message["content"]) == {"city": "Rome"}


def test_a_forced_call_comes_after_the_reasoning_and_its_budget(client, engine):
    say(engine, 'one two{"name": "weather", "arguments": {"city": "Rome"}}', insists=True)
    budget = len(engine.tokenizer.encode("one two", add_special_tokens=False))
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    message = ask(client, **forced, thinking_budget_tokens=budget)["choices"][0]["message"]
    assert message["reasoning_content"] == "one two"
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Rome"})


def test_a_budget_does_not_end_a_call_that_ended_the_reasoning(client, engine):
    say(engine, f"Hm.{CALL}", insists=True)
    budget = len(engine.tokenizer.encode(f"Hm.{CALL[:-50]}", add_special_tokens=False))
    message = ask(client, tools=[TOOL], thinking_budget_tokens=budget)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (message["reasoning_content"], json.loads(call["function"]["arguments"])) == ("Hm.", ARGUMENTS)


def test_a_call_that_reasoning_mentions_does_not_end_it_before_a_structure(client, engine):
    thought = "I write <tool_call>\n<function=weather> so."
    say(engine, f'{thought}</think>{{"name": "weather", "arguments": {{"city": "Rome"}}}}', insists=True)
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    message = ask(client, **forced)["choices"][0]["message"]
    assert message["reasoning_content"] == thought
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"city": "Rome"}]
    say(engine, f'{thought}</think>{{"city": "Rome"}}', insists=True)
    message = ask(client, tools=[TOOL], response_format=OBJECT)["choices"][0]["message"]
    assert (message["reasoning_content"], json.loads(message["content"])) == (thought, {"city": "Rome"})


@pytest.fixture(scope="module")
def marked(tokenizer):
    """An engine in whose vocabulary the reasoning's markers are tokens, and whose prompt does not begin it."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(text, special=True) for text in ("<think>", "</think>")])
    known = dataclasses.replace(tokenizer, backend=backend).with_chat_template(template("<call>{{ f.name }}</call>"))
    return FakeEngine(known)


@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>"])
def test_a_structured_answer_may_do_without_reasoning(marked, thought):
    say(marked, thought + '{"city": "Rome"}', insists=True)
    with TestClient(app_of(marked), base_url="http://localhost") as client:
        message = ask(client, response_format=OBJECT)["choices"][0]["message"]
    assert message.get("reasoning_content", "") == ("Hm." if thought else "")
    assert json.loads(message["content"]) == {"city": "Rome"}
    assert marked.requests[-1].skip_special_tokens is False  # the markers are special tokens


def gate(engine, **fields):
    known = engine.tokenizer.templates["default"]
    form = find_answer_format(known, special_tokens={})
    made = gate_of(form, engine.tokenizer, prompt="<|assistant|><think>\n", budget=fields.pop("budget", 2))
    assert made is not None
    return dataclasses.replace(made, **fields)


def test_copies_of_a_budget_count_for_themselves(engine):
    first = AfterReasoning(gate(engine), engine.tokenizer, None)
    first.advance(5)
    second = first.fork()
    second.advance(6)
    rows = torch.zeros(2, engine.vocabulary)
    first.mask(rows[0])
    second.mask(rows[1])
    assert torch.isfinite(rows[0]).all()
    assert torch.isfinite(rows[1]).nonzero().tolist() == [[second.gate.closing_ids[0]]]
    assert not first.done
    assert not second.done


def test_a_constraint_after_reasoning_travels_to_a_replica(engine):
    constraint = AfterReasoning(gate(engine), engine.tokenizer, None)
    request = Request(id="a", prompt=[1], params=SamplingParams(max_new_tokens=2), constraint=constraint)
    assert pickle.loads(pickle.dumps(packed(request))).constraint.gate == constraint.gate


def test_the_engine_follows_budgets_and_structures(tokenizer):
    from hasten.engine.async_engine import AsyncEngine
    from hasten.engine.engine import Engine
    from hasten.engine.settings import EngineSettings
    from references import tiny_llama

    settings = EngineSettings(max_sequences=4, token_budget=64, max_length=400, cache_bytes=1 << 22)
    known = tokenizer.with_chat_template(TEMPLATES["parameters"])
    closing = len(known.encode("\n</think>\n\n", add_special_tokens=False))
    with TestClient(app_of(AsyncEngine(Engine(tiny_llama(), known, settings))), base_url="http://localhost") as client:
        fields = {"thinking_budget_tokens": 3, "temperature": 1.0, "seed": 1}
        found = ask(client, **fields, max_tokens=30, n=2)
        reasoning = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 2 * 1 < reasoning <= 2 * (3 + closing)
        assert all(choice["message"]["content"] for choice in found["choices"])
        found = ask(client, **fields, response_format=OBJECT)
        assert set(json.loads(found["choices"][0]["message"]["content"])) <= {"city", "days"}
