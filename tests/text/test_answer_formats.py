"""How a template writes reasoning and calls is found from it, and what it renders is read back, cut anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_templates import TEMPLATES, template
from hasten.text.answer_format import AnswerFormat, find_answer_format
from hasten.text.answer_reader import AnswerReader, TemplateCallReader
from hasten.text.chat import ChatTemplate

ARGUMENTS = {"city": 'Zürich "x" <b>, it\'s', "days": 3, "deep": {"a": "y", "n": 1}, "on": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "on": {"type": "boolean"},
    },
}
SCHEMAS = {"get_weather": SCHEMA, "get_time": SCHEMA}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in SCHEMAS]
QUESTION = [{"role": "user", "content": "hi"}]
FORMATS = {}


def form_of(name):
    if name not in FORMATS:
        FORMATS[name] = find_answer_format(ChatTemplate(TEMPLATES[name], name), special_tokens={})
    return FORMATS[name]


def read(form, pieces, *, prompt="", cut=False):
    """Content, reasoning, and [name, arguments] of calls, from pieces of an answer."""
    calls = TemplateCallReader(form.calls, SCHEMAS) if form.calls is not None else None
    reader = AnswerReader(form, prompt=prompt, calls=calls)
    found = [reader.push(piece) for piece in pieces]
    found.append(reader.finish(cut=cut))
    read_calls = []
    for piece in (piece for one in found for piece in one.calls):
        if piece.name is not None:
            read_calls.append([piece.name, ""])
        read_calls[piece.index][1] += piece.arguments
    return "".join(one.content for one in found), "".join(one.reasoning for one in found), read_calls


def rendered(name, **message):
    """The prompt, without a reasoning that the answer does not have, and the answer as the template writes it."""
    source = ChatTemplate(TEMPLATES[name], name)
    options = {"special_tokens": {}, "tools": TOOLS}
    prompt = source.render(QUESTION, add_generation_prompt=True, **options)
    whole = source.render([*QUESTION, {"role": "assistant", **message}], add_generation_prompt=False, **options)
    prompt = prompt if whole.startswith(prompt) else prompt.removesuffix("<think>\n")
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix("<|end|>")


def calls_of(*names):
    return [
        {"id": f"call{i}_id", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for i, name in enumerate(names)
    ]


MESSAGES = {
    "a call": {"content": "", "tool_calls": calls_of("get_weather")},
    "two calls": {"content": "", "tool_calls": calls_of("get_weather", "get_time")},
    "text and a call": {"content": "Let me see.", "tool_calls": calls_of("get_time")},
    "reasoning and a call": {"content": "", "reasoning_content": "Hm, <so>.", "tool_calls": calls_of("get_weather")},
    "reasoning and text": {"content": "1 < 2, {x: [1]}", "reasoning_content": "Hm, so."},
}


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_is_read_back_cut_anywhere(name, message):
    wanted = MESSAGES[message]
    if name == "channels" and message in ("two calls", "text and a call"):
        pytest.skip("one message of a channel each")
    prompt, answer = rendered(name, **wanted)
    cuts = [[answer], list(answer), *([answer[:i], answer[i:]] for i in range(1, len(answer)))]
    for pieces in cuts:
        content, reasoning, calls = read(form_of(name), pieces, prompt=prompt)
        assert (content.strip(), reasoning) == (wanted["content"], wanted.get("reasoning_content", ""))
        found = [(called, json.loads(arguments)) for called, arguments in calls]
        functions = [call["function"] for call in wanted.get("tool_calls", ())]
        assert found == [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_come_before_the_call_ends(name):
    _, answer = rendered(name, content="", tool_calls=calls_of("get_weather"))
    place = answer.index("Zürich") + 3
    _, _, calls = read(form_of(name), [answer[:place]], cut=True)
    assert [called for called, _ in calls] == ["get_weather"]
    assert calls[0][1].replace(" ", "") == '{"city":"Zür'


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "channels"])
def test_an_unknown_function_is_text(name):
    form = form_of(name)
    _, answer = rendered(name, content="", tool_calls=calls_of("get_weather"))
    answer = answer.replace("get_weather", "no_such_function")
    content, _, calls = read(AnswerFormat(calls=form.calls), list(answer))
    assert (content, calls) == (answer, [])


PIECES = ["<think>", "</think>", "<tool_call>", "<function=", "get", "_time", ">", "<|call|>", "<|section|>"]
PIECES += ["functions.", "<parameter=", "</parameter>", "\n", "<|q|>", *" ()=x,\\'[]{}:\""]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=60))
def test_no_text_fails(name, pieces):
    for cut in (False, True):
        whole = read(form_of(name), ["".join(pieces)], cut=cut)
        assert read(form_of(name), pieces, cut=cut) == whole


def test_reasoning_that_a_call_ends():
    form = form_of("parameters")
    _, answer = rendered("parameters", content="", tool_calls=calls_of("get_time"))
    content, reasoning, calls = read(form, list("Hm. " + answer), prompt="<|assistant|><think>\n")
    assert (content.strip(), reasoning, [name for name, _ in calls]) == ("", "Hm.", ["get_time"])


def test_nothing_is_left_around_reasoning_and_calls():
    _, answer = rendered("parameters", content="", tool_calls=calls_of("get_time"))
    assert read(form_of("parameters"), list(f"{answer}\n"))[0] == ""
    assert read(form_of("parameters"), list("Hm.\n</think>\n\n"), prompt="<think>") == ("", "Hm.", [])


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("objects", '<call>{"name": "get_time"}</call>'),
        ("objects", '<call>{"name": "get_time", "arguments": {}}</call>'),
        ("parameters", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"),
        ("parameters", "<tool_call>\n<function=get_time>"),
        ("parameters", "<tool_call>\n<function=get_time>\n</func"),
        ("loose", "<|call>call:get_time{}<call|>"),
        ("python", "<|calls|>[get_time()]<|end_calls|>"),
        ("keys and values", "<tool_call>get_time\n</tool_call>"),
    ],
)
def test_a_call_without_arguments(name, answer):
    for pieces in ([answer], list(answer)):
        content, _, calls = read(form_of(name), pieces)
        assert (content, calls) == ("", [["get_time", "{}"]])


VALUES = [
    ("string", " 007 ", " 007 "),
    ("integer", "7", 7),
    ("boolean", "True", True),
    ("array", "[1, 'a', None]", [1, "a", None]),
    ("object", '{"a": [1]}', {"a": [1]}),
    ("number", "NaN", "NaN"),
    ("integer", "no number", "no number"),
    (["string", "null"], "7", "7"),
    (["string", "null"], "null", None),
    (["integer", "string"], "7", 7),
    (None, "7", "7"),
]


@pytest.mark.parametrize(("kind", "written", "value"), VALUES)
def test_values_between_tags_are_typed_by_the_schema(kind, written, value):
    schema = {"properties": {"x": {} if kind is None else {"type": kind}}}
    options = [{"type": one} for one in kind] if isinstance(kind, list) else [schema["properties"]["x"]]
    for given_schema in (schema, {"properties": {"x": {"anyOf": options}}}):
        reader = TemplateCallReader(form_of("parameters").calls, {"f": given_schema})
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
        calls = [call for piece in (*map(reader.push, text), reader.finish()) for call in piece.calls]
        assert json.loads("".join(call.arguments for call in calls)) == {"x": value}


def test_a_prompt_that_ends_the_reasoning_turns_it_off():
    content, reasoning, _ = read(form_of("parameters"), list("so"), prompt="<|assistant|><think>\n\n</think>\n\n")
    assert (content, reasoning) == ("so", "")


def test_templates_without_a_format():
    silent = template("", REASONING="")
    assert find_answer_format(ChatTemplate(silent, "x"), special_tokens={}) == AnswerFormat()
    failing = "{{ raise_exception('no') }}"
    assert find_answer_format(ChatTemplate(failing, "x"), special_tokens={}) == AnswerFormat()


def test_a_template_that_shows_tools_in_answers_and_calls_without_arguments():
    shown = ChatTemplate(template("called", HEAD="<|assistant|>{{ tools | tojson }}"), "x")
    assert find_answer_format(shown, special_tokens={}).calls is None


@pytest.mark.parametrize("parts", [{"CONTENT": '"{{ m.content }}"'}, {"REASONING": "({{ m.reasoning_content }}) "}])
def test_signs_that_text_has_too_are_no_markers(parts):
    source = template('<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>', **parts)
    form = find_answer_format(ChatTemplate(source, "x"), special_tokens={})
    answer = '(so) he said "yes"'
    for pieces in ([answer], list(answer)):
        assert read(form, pieces, prompt="<|assistant|>") == (answer, "", [])


@pytest.mark.parametrize("value", ["line\n", "\nline", " a \n\n", "", "\n", " ", "c:\\x\\d", 'it\'s, "so"', "é😀"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_values_keep_their_white_space_and_signs(name, value, monkeypatch):
    monkeypatch.setitem(ARGUMENTS, "city", value)
    _, answer = rendered(name, content="", tool_calls=calls_of("get_weather"))
    for pieces in ([answer], list(answer)):
        ((_, arguments),) = read(form_of(name), pieces)[2]
        assert json.loads(arguments) == ARGUMENTS


@settings(max_examples=200, deadline=None)
@given(value=st.text(st.sampled_from("a1xu\\'\"\n\x07é,)={ ")), size=st.integers(1, 9))
def test_texts_in_a_call_in_python(value, size):
    text = f"<|calls|>[get_time(city={value!r}, days = 3)]<|end_calls|>"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    ((_, arguments),) = read(form_of("python"), pieces)[2]
    assert json.loads(arguments) == {"city": value, "days": 3}


def test_the_tail_of_an_answer_needs_no_special_tokens():
    source = ChatTemplate(template("", REASONING=""), "x")
    form = find_answer_format(source, special_tokens={"eos_token": "</s>"})
    assert form.markers(calls=True) == []
    ended = ChatTemplate(template("", REASONING="", CONTENT="{{ m.content }}<|turn|></s>"), "x")
    form = find_answer_format(ended, special_tokens={"eos_token": "</s>"})
    assert (form.tail, form.markers(calls=True)) == ("<|turn|>", [])


def test_a_call_in_the_commentary_channel_as_gpt_oss_writes_it():
    """Its template writes the recipient before the channel, the model behind it."""
    call = ' to=functions.get_time <|constrain|>json<|message|>{"city": "Rome"}'
    thought = "<|channel|>analysis<|message|>Hm.<|close|><|start|>assistant"
    for answer, reasoning in ((f"{thought}<|channel|>commentary{call}", "Hm."), (f"<|channel|>commentary{call}", "")):
        for pieces in ([answer], list(answer)):
            found = read(form_of("channels"), pieces, prompt="<|start|>assistant")
            assert found == ("", reasoning, [["get_time", '{"city": "Rome"}']])
