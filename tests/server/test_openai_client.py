"""OpenAI's own client against a server over HTTP: plain, streamed, asynchronous, tools, structured output."""

import asyncio
import datetime
import json

import httpx
import openai
import pytest

from fake_engine import FakeEngine
from server_case import TOOL_TEMPLATE, app_of, serving

ANSWER = "def add(a, b):\n    return a + b\n"
TALK = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def engine():
    from references import tiny_llama

    return FakeEngine(tiny_llama().tokenizer.with_chat_template(TOOL_TEMPLATE))


@pytest.fixture(scope="module")
def url(engine):
    with serving(app_of(engine)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def says(engine):
    """Let the engine say something else for a test."""
    before = engine.answer

    def say(text):
        engine.answer = engine.tokenizer.encode(text, add_special_tokens=False)

    yield say
    engine.answer = before


def test_completion(client):
    answer = client.completions.create(model="tiny", prompt="def", max_tokens=100)
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_completions_of_several_prompts_with_several_samples(client):
    answer = client.completions.create(model="tiny", prompt=["def", "for"], n=2, max_tokens=2, echo=True, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["defdef add"] * 2 + ["fordef add"] * 2
    for choice in answer.choices:
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text
        assert found.token_logprobs[0] is None
        assert all(value < 0 for value in found.token_logprobs[1:])
        assert [
            choice.text[a:b] for a, b in zip(found.text_offset, found.text_offset[1:], strict=False)
        ] == found.tokens[:-1]
    assert answer.usage.completion_tokens == 8


def test_the_prompt_alone_with_its_logprobs(client):
    answer = client.completions.create(model="tiny", prompt="def add", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "def add"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == ["def", " add"]


def test_a_stream_of_completions_equals_the_whole(client):
    asked = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "logprobs": 1}
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    whole = client.completions.create(**asked)
    texts, offsets = [""] * 4, [[] for _ in range(4)]
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=TALK, max_completion_tokens=5, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["def add(a,"] * 2
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "def add(a,"
    assert bytes(content[0].bytes) == b"def"
    assert len(content[0].top_logprobs) == 2


def test_a_stream_of_chat_equals_the_whole(client):
    stream = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=6, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, roles, usage = ["", ""], [None, None], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.delta.role:
                roles.append(choice.index)
    assert texts == ["def add(a, b"] * 2
    assert reasons == ["length"] * 2
    assert sorted(roles) == [0, 1]
    assert usage.completion_tokens == 12


def test_asynchronous_and_many_at_once(url, engine):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            calls = [client.chat.completions.create(model="tiny", messages=TALK, max_tokens=100) for _ in range(20)]
            answers = await asyncio.gather(*calls)
            stream = await client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            return [answer.choices[0].message.content for answer in answers], text

    answers, text = asyncio.run(ask())
    assert [*answers, text] == [ANSWER] * 21
    assert not engine.running


def test_structured_output_keeps_to_its_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=TALK, response_format=form, max_tokens=400)
    found = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert found["kind"] in ("a", "b")
    assert len(found["name"]) <= 5
    answer = client.chat.completions.create(
        model="tiny", messages=TALK, response_format={"type": "json_object"}, max_tokens=400, n=2
    )
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in answer.choices)


def test_the_clients_own_parsing_of_structured_output(client):
    import pydantic

    class Thing(pydantic.BaseModel):
        kind: bool
        count: int

    answer = client.chat.completions.parse(model="tiny", messages=TALK, response_format=Thing, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Thing)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "nothing"}}},
        {"type": "string", "format": 5},
        {"type": "object", "patternProperties": {"(": {}}},
        {"$ref": "http://example.com/schema"},
        {"type": "object", "unevaluatedProperties": {"not": {}}},
        {"type": "string", "enum": ["x" * 100_000]},
    ],
)
def test_a_schema_that_is_not_understood_is_refused(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="tiny", messages=TALK, response_format=form)
    assert refusal.value.param == "response_format"


def test_an_unknown_format_is_an_annotation(client):
    import pathlib

    import pydantic

    class File(pydantic.BaseModel):
        path: pathlib.Path
        format: bool  # a property of this name is none
        day: datetime.date

    answer = client.chat.completions.parse(model="tiny", messages=TALK, response_format=File, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, File)
    for schema in ({"type": "string", "format": "no-such"}, {"enum": [{"format": "path"}]}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = client.chat.completions.create(model="tiny", messages=TALK, response_format=form, max_tokens=400)
        found = json.loads(answer.choices[0].message.content)
        assert found == {"format": "path"} if "enum" in schema else isinstance(found, str)


def test_forced_calls_keep_to_schemas_that_refer_to_parts_of_themselves(client):
    import pydantic

    class In(pydantic.BaseModel):
        const: bool

    class Out(pydantic.BaseModel):
        inner: In
        others: list[In] = []

    class Tree(pydantic.BaseModel):
        children: list["Tree"]

    tools = [openai.pydantic_function_tool(model) for model in (Out, Tree)]
    forced = ["required", *({"type": "function", "function": {"name": name}} for name in ("Out", "Tree"))]
    for choice in forced:
        for shown in (tools, tools[:1]) if choice == "required" else (tools,):
            for parallel in (True, False):
                answer = client.chat.completions.create(
                    model="tiny",
                    messages=TALK,
                    tools=shown,
                    tool_choice=choice,
                    max_tokens=400,
                    parallel_tool_calls=parallel,
                )
                for call in answer.choices[0].message.tool_calls:
                    {"Out": Out, "Tree": Tree}[call.function.name].model_validate_json(call.function.arguments)


def test_what_would_cut_a_structure_is_refused(client):
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    for name, value in {"stop": ":", "stop_token_ids": [5], "min_tokens": 2, "ignore_eos": True}.items():
        for extra in ({"response_format": form}, {"tools": [TOOL], "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError) as refusal:
                client.chat.completions.create(model="tiny", messages=TALK, extra_body={name: value} | extra)
            assert refusal.value.param == name
    answer = client.chat.completions.create(model="tiny", messages=TALK, response_format=form, max_tokens=400, stop=[])
    assert json.loads(answer.choices[0].message.content)


def test_a_tool_is_called_in_the_models_own_format(client, engine, says):
    says('I look. <tool_call>\n{"name": "weather", "arguments": {"name": "x", "kind": "a"}}\n</tool_call>')
    answer = client.chat.completions.create(model="tiny", messages=TALK, tools=[TOOL, OTHER], max_tokens=300)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look. "
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"name": "x", "kind": "a"}
    shown = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert '"weather"' in shown
    turn = {"role": "assistant", "tool_calls": [call.model_dump() for call in message.tool_calls]}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    client.chat.completions.create(model="tiny", messages=[*TALK, turn, result], tools=[TOOL], max_tokens=1)
    assert '"arguments": {"name": "x", "kind": "a"}' in engine.tokenizer.decode(engine.requests[-1].prompt)


def test_a_streamed_tool_call(client, says):
    says('ok <tool_call>{"name": "time", "arguments": {}}</tool_call><tool_call>{"name": "time"}</tool_call>')
    text, calls, reason = "", [], None
    for chunk in client.chat.completions.create(model="tiny", messages=TALK, tools=[TOOL, OTHER], stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reason = choice.finish_reason or reason
    assert (text, reason) == ("ok ", "tool_calls")
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "time", "{}"),
        (1, "time", "{}"),
    ]
    assert calls[0].id != calls[1].id


def test_forced_tools(client):
    named = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model="tiny", messages=TALK, tools=[OTHER, TOOL], tool_choice=named, max_tokens=400
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["kind"] in ("a", "b")
    answer = client.chat.completions.create(
        model="tiny", messages=TALK, tools=[OTHER], tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["time"]
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_stays_a_call(client, engine, stream):
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": "tiny", "messages": TALK, "tools": [TOOL, OTHER]}
    whole = client.chat.completions.create(**asked, tool_choice=named, max_tokens=400)
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    seen = set()
    for most in range(1, whole.usage.completion_tokens, 4):
        answer = client.chat.completions.create(**asked, tool_choice=named, max_tokens=most, stream=stream)
        chunks = list(answer) if stream else [answer]
        text = "".join((c.choices[0].delta if stream else c.choices[0].message).content or "" for c in chunks)
        calls = [x for c in chunks for x in (c.choices[0].delta if stream else c.choices[0].message).tool_calls or ()]
        assert text == ""
        assert chunks[-1].choices[0].finish_reason == "length"
        assert [call.function.name for call in calls] == ["weather"]
        seen.add(calls[0].function.arguments)
    assert "" in seen
    assert any(0 < len(found) < len(arguments) for found in seen)
    answer = client.chat.completions.create(**asked, tool_choice="required", max_tokens=1)
    message = answer.choices[0].message
    assert (message.content or "", message.tool_calls, answer.choices[0].finish_reason) == ("", None, "length")


def test_forced_tools_need_no_place_in_the_template(engine):
    plain = FakeEngine(engine.tokenizer.with_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with serving(app_of(plain)) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = {"model": "tiny", "messages": TALK, "tools": [OTHER], "max_tokens": 400}
        answer = client.chat.completions.create(**asked, tool_choice="required")
        assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"time"}
        with pytest.raises(openai.BadRequestError, match='shows it no tools; tool_choice "required" or a name works'):
            client.chat.completions.create(**asked)


def test_the_last_message_is_continued(client, engine, url):
    turn = [*TALK, {"role": "assistant", "content": "Well, "}]
    client.chat.completions.create(model="tiny", messages=turn, extra_body={"continue_final_message": True})
    shown = list(engine.requests[-1].prompt)
    assert engine.tokenizer.decode(shown).endswith("<|assistant|>Well, ")
    client.chat.completions.create(model="tiny", messages=turn)
    assert engine.tokenizer.decode(engine.requests[-1].prompt).endswith("Well, <|assistant|>")
    body = {"messages": turn, "continue_final_message": True}
    assert httpx.post(f"{url}/tokenize", json=body).json()["tokens"] == shown
    for last in ({"role": "assistant", "content": " "}, {"role": "assistant", "tool_calls": []}):
        extra = {"continue_final_message": True}
        with pytest.raises(openai.BadRequestError, match="needs text in the last message"):
            client.chat.completions.create(model="tiny", messages=[*TALK, last], extra_body=extra)


def test_the_template_gets_its_variables(engine):
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}|{{ x }}"
    talking = FakeEngine(engine.tokenizer.with_chat_template(template))
    app = app_of(talking, chat_template_kwargs={"thinking": 1})
    with serving(app) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:

        def prompt(**asked):
            client.chat.completions.create(model="tiny", messages=TALK, **asked)
            return talking.tokenizer.decode(talking.requests[-1].prompt)

        assert prompt() == "hi||1||"
        assert prompt(reasoning_effort="none") == "hi|False|False||"
        assert prompt(reasoning_effort="high") == "hi||1|high|"
        given = {"enable_thinking": False, "thinking": 2, "x": "é"}
        assert prompt(extra_body={"chat_template_kwargs": given}) == "hi|False|2||é"
        given = {"enable_thinking": True}
        assert prompt(reasoning_effort="none", extra_body={"chat_template_kwargs": given}) == "hi|True|False||"


def test_embeddings(client):
    answer = client.embeddings.create(model="tiny", input=["def", "def add"])  # the client asks for base64
    assert [len(entry.embedding) for entry in answer.data] == [3, 3]
    assert sum(x * x for x in answer.data[1].embedding) == pytest.approx(1)
    plain = client.embeddings.create(model="tiny", input=["def", "def add"], encoding_format="float")
    assert plain.data[1].embedding == pytest.approx(answer.data[1].embedding)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_kinds(client, engine):
    from hasten.engine.request import EngineFailed, QueueFull, RequestRefused

    cases = [
        (QueueFull("the queue is full", retry_after=3), openai.RateLimitError),
        (RequestRefused("it can never fit"), openai.BadRequestError),
        (EngineFailed("a step failed"), openai.InternalServerError),
    ]
    try:
        for error, kind in cases:
            engine.refusal = error
            with pytest.raises(kind) as raised:
                client.completions.create(model="tiny", prompt="x")
            assert str(error) in raised.value.message
            if isinstance(error, QueueFull):
                assert raised.value.response.headers["retry-after"] == "3"
    finally:
        engine.refusal = None


def test_a_failure_in_the_middle_of_a_stream_is_told(client, engine):
    engine.fails_after = 2
    try:
        with pytest.raises(openai.APIError, match="as it was told"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
    finally:
        engine.fails_after = None
    assert not engine.running
