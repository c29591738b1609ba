"""Every field of a request is honoured, without effect and said so, or refused by its name."""

import typing

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from starlette.testclient import TestClient

import hasten
from hasten.engine.request import RequestRefused
from hasten.server.errors import from_library
from server_case import app_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "tiny", "prompt": "def", "max_tokens": 3}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def refused(client, path, body, param, status=400):
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_what_is_asked_reaches_the_engine(client, engine):
    body = PROMPT | {
        "n": 2,
        "best_of": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "priority": 4,
        "cache_salt": "s",
        "skip_special_tokens": False,
        "logprobs": 2,
        "user": "me",
    }
    assert client.post(COMPLETIONS, json=body).status_code == 200
    request = engine.requests[-1]
    params = request.params
    assert (request.n, request.best_of, request.logprobs, request.priority, request.salt) == (2, 3, 2, 4, "s")
    assert request.skip_special_tokens is False
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.min_new_tokens) == (("x",), (9,), True, 2)
    assert params.logit_bias[5] == -100
    assert params.max_new_tokens == 3
    assert params.seed is not None
    assert params.seed >= 0


NEUTRAL = [
    (
        COMPLETIONS,
        {
            "suffix": "",
            "best_of": 1,
            "logit_bias": {},
            "stop": [],
            "use_beam_search": False,
            "length_penalty": 1.0,
            "top_k": -1,
        },
    ),
    (COMPLETIONS, dict.fromkeys(("suffix", "prompt_logprobs", "seed", "logprobs", "temperature", "no_such_field"))),
    (CHAT, {"store": False, "metadata": {}, "service_tier": "auto", "modalities": ["text"], "function_call": "none"}),
    (CHAT, {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True, "tools": []}),
    (CHAT, {"top_logprobs": 0, "stream_options": {"include_usage": False}}),
    (CHAT, {"top_logprobs": 0, "logprobs": False, "stream_options": {}}),
    (COMPLETIONS, {"stream_options": {"include_usage": False, "continuous_usage_stats": False}}),
    (CHAT, {"chat_template_kwargs": {}, "reasoning_effort": None, "stream_options": None, "max_completion_tokens": 3}),
]


@pytest.mark.parametrize(("path", "extra"), NEUTRAL)
def test_neutral_values_are_accepted(client, path, extra):
    answer = client.post(path, json=(PROMPT if path == COMPLETIONS else TALK) | extra)
    assert answer.status_code == 200, answer.text


REFUSED = [
    (COMPLETIONS, {"suffix": "end"}, "suffix"),
    (COMPLETIONS, {"length_penalty": 0.5}, "length_penalty"),
    (COMPLETIONS, {"detokenize": False}, "detokenize"),
    (COMPLETIONS, {"detokenize": 1}, "detokenize"),  # 1 is not True
    (COMPLETIONS, {"temperature": -0.1}, "temperature"),
    (COMPLETIONS, {"temperature": "0"}, "temperature"),
    (COMPLETIONS, {"temperature": True}, "temperature"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 200}, "n"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"stop": ["x" * 300]}, "stop[0]"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"999999": 1}}, "logit_bias"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 257}, "prompt"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"min_tokens": 9}, "min_tokens"),
    (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids"),
    (COMPLETIONS, {"stop": ""}, "stop"),
    (COMPLETIONS, {"stop": ["a", ""]}, "stop[1]"),
    (COMPLETIONS, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, ...),
    (CHAT, {"audio": {}}, "audio"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (COMPLETIONS, {"grammar": "root ::= x"}, "grammar"),
    (COMPLETIONS, {"xtc_probability": 0.5}, "xtc_probability"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    (CHAT, {"response_format": {"type": "json_object", "no_such_field": 1}}, "response_format.no_such_field"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("path", "extra", "param"), REFUSED)
def test_anything_else_is_refused_by_name(client, path, extra, param):
    body = (PROMPT if path == COMPLETIONS else TALK) | extra
    if param is ...:
        assert client.post(path, json=body).status_code == 400
    else:
        refused(client, path, body, param)


BOOKKEEPING = {
    "metadata": {"a": "b"},
    "store": True,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "me",
    "service_tier": "flex",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "client_metadata": {"x": "y"},
    "stream": True,
    "stream_options": {"include_obfuscation": True},
    "xtc_probability": 0,
    "top_n_sigma": -1.0,
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bookkeeping_has_no_effect(client, path):
    answer = client.post(path, json=(PROMPT if path == COMPLETIONS else TALK) | BOOKKEEPING)
    assert answer.status_code == 200, answer.text
    assert "x-hasten-ignored" not in answer.headers


# What OpenAI's clients may send and this server does not do.
UNSUPPORTED = {"audio", "function_call", "functions", "modalities", "moderation", "dimensions"}
UNSUPPORTED |= {"background", "conversation", "prompt", "truncation", "web_search_options"}


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("CompletionBody", completion_create_params.CompletionCreateParamsBase),
        ("ChatBody", chat_create_params.CompletionCreateParamsBase),
        ("EmbeddingBody", embedding_create_params.EmbeddingCreateParams),
        ("ResponsesBody", response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_openais_client_is_known(path, params):
    from hasten.server.bodies import ChatBody
    from hasten.server.completions import CompletionBody
    from hasten.server.embeddings import EmbeddingBody
    from hasten.server.responses import ResponsesBody

    body = {one.__name__: one for one in (ChatBody, CompletionBody, EmbeddingBody, ResponsesBody)}[path]
    fields = set(typing.get_type_hints(params))
    assert fields <= {*body.model_fields, *body.bookkeeping, *body.neutral}
    assert fields & set(body.neutral) <= UNSUPPORTED


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"])
def test_unknown_fields_are_ignored_and_named(client, path):
    body = {"/v1/embeddings": {"model": "tiny", "input": "x"}, "/detokenize": {"model": "tiny", "tokens": [1]}}
    body |= {COMPLETIONS: PROMPT, CHAT: TALK, "/tokenize": {"prompt": "x"}}
    answer = client.post(path, json=body[path] | {"no_such_field": 1, "other": []})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hasten-ignored"] == "no_such_field,other"
    for name in ("bad\r\nname", "x" * 1000, "é", ""):
        assert client.post(path, json=body[path] | {name: 1}).json()["error"]["code"] == "unknown_parameter"


def test_strict_fields_refuse_unknown_ones(engine):
    with TestClient(app_of(engine, strict_fields=True)) as strict:
        error = refused(strict, COMPLETIONS, PROMPT | {"no_such_field": 1}, "no_such_field")
        assert error["code"] == "unknown_parameter"
        assert strict.post(CHAT, json=TALK | {"metadata": {"a": "b"}}).status_code == 200


def test_what_other_servers_put_into_an_answer_may_be_sent_back(client, engine):
    answer = {"role": "assistant", "content": "yes", "reasoning": "hm", "annotations": [{"x": 1}], "provider": "p"}
    call = {"index": 7, "id": "a", "function": {"name": "f", "arguments": "{}", "x": 1}, "extra_content": {}}
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {}}]
    turns = [{"role": "user", "content": parts}, answer, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}
    body = TALK | {"messages": [*turns, *TALK["messages"]], "tools": [tool], "tool_choice": "none"}
    assert client.post(CHAT, json=body).status_code == 200
    assert "yes" in engine.tokenizer.decode(engine.requests[-1].prompt)


WORDS = [
    ({"n": 129}, "n: 129; this server's limit is 128"),
    ({"prompt": [-1]}, "prompt[0]: Input should be greater than or equal to 0"),
    ({"prompt": [[1], [-1]]}, "prompt[1][0]: Input should be greater than or equal to 0"),
    ({"prompt": ["a", 1]}, "prompt[1]: Input should be a valid string"),
    ({"prompt": [1, "a"]}, "prompt[1]: Input should be a valid integer"),
    ({"min_new_tokens": 4}, "min_new_tokens is not supported by this server; accepted: 0"),
    ({"detokenize": False}, "detokenize is not supported by this server; accepted: true"),
]


@pytest.mark.parametrize(("extra", "words"), WORDS)
def test_the_message_says_what_is_wrong_where(client, extra, words):
    assert client.post(COMPLETIONS, json=PROMPT | extra).json()["error"]["message"] == words


def test_more_samples_than_the_engine_runs_name_the_field():
    from references import tiny_llama

    llm = hasten.LLM(tiny_llama(), max_sequences=4, token_budget=32, cache_bytes=1 << 20)
    for fields, name in (({"n": 5}, "n"), ({"n": 1, "best_of": 5}, "best_of")):
        with pytest.raises(RequestRefused) as refusal:
            llm.generate("def", hasten.SamplingParams(max_new_tokens=2), **fields)
        assert from_library(refusal.value).param == name
    llm.close()


def test_a_model_is_its_exact_name(client):
    for name in ("Tiny", "tiny ", "../tiny", "/etc/passwd", ""):
        assert refused(client, COMPLETIONS, PROMPT | {"model": name}, "model", 404)["code"] == "model_not_found"
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/..%2F..%2Fetc%2Fpasswd").status_code == 404


def test_without_a_name_a_request_is_for_the_served_model(client):
    prompt, talk = ({name: value for name, value in body.items() if name != "model"} for body in (PROMPT, TALK))
    for path, body in ((COMPLETIONS, prompt), (CHAT, talk), (CHAT, TALK | {"model": None})):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    assert client.post("/v1/messages", json=talk).json()["model"] == "tiny"
    assert client.post("/v1/responses", json={"input": "hi"}).json()["model"] == "tiny"


def test_what_is_missing_is_named(client):
    error = refused(client, CHAT, {"model": "tiny"}, "messages")
    assert error["message"] == "messages is missing; this request needs it"
    assert error["code"] == "missing_required_parameter"


def test_a_folder_recommends_what_a_request_leaves_out(engine):
    folder = {"temperature": 0.25, "top_k": 5, "min_p": None, "do_sample": True, "eos_token_id": [2]}
    with TestClient(app_of(engine, defaults=folder)) as client:
        assert client.post(COMPLETIONS, json=PROMPT | {"top_k": 9}).status_code == 200
    assert (engine.requests[-1].params.temperature, engine.requests[-1].params.top_k) == (0.25, 9)


def test_a_prompt_too_long_is_refused_before_it_is_encoded(client):
    error = refused(client, COMPLETIONS, PROMPT | {"prompt": "x" * 2_000_000}, "prompt")
    assert error["code"] == "context_length_exceeded"
