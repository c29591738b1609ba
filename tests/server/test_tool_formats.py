"""Tool calls in the formats of the common templates, whole and in pieces of any size."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.server.tools import MARKERS, CallReader, ParsedCall, find_format

ARGUMENTS = {"city": 'Zürich "x"', "deep": {"a": [1, None]}}
WEATHER = json.dumps({"name": "weather", "arguments": ARGUMENTS})
CASES = [
    ("hermes", f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>", "Let me see.\n", 1),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>", "", 2),
    ("hermes", f"<tool_call>{WEATHER}", "", 1),  # the end marker was the end-of-text token
    ("mistral", f"[TOOL_CALLS][{WEATHER}, {WEATHER}]", "", 2),
    ("mistral", f"Hm. [TOOL_CALLS] [{WEATHER}]", "Hm. ", 1),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}", "", 1),
    ("mistral", f"[TOOL_CALLS]weather{json.dumps(ARGUMENTS)}[TOOL_CALLS]weather{json.dumps(ARGUMENTS)}", "", 2),
    ("llama", json.dumps({"name": "weather", "parameters": ARGUMENTS}), "", 1),
    ("llama", f"<|python_tag|>{WEATHER}; {WEATHER}", "", 2),
    ("llama", f"\n{WEATHER}", "", 1),
    ("hermes", WEATHER, "", 1),  # as small models answer
    ("hermes", f"\n```json\n{json.dumps(json.loads(WEATHER), indent=2)}\n```\n", "", 1),
    ("hermes", f"```\n{WEATHER}```", "", 1),
    ("hermes", f"{WEATHER}\n<tool_call>{WEATHER}</tool_call>", f"{WEATHER}\n", 1),
    (None, WEATHER, "", 1),
    (None, f"[{WEATHER}, {WEATHER}]", "", 2),
]
TEXTS = [
    ("hermes", "no call at all, 1 < 2"),
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", f"<tool_call>{WEATHER}</tool_call> and more"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("hermes", "<tool_cal"),
    ("hermes", f"```json\n{WEATHER}\n``` and more"),
    ("hermes", f"Text first ```json\n{WEATHER}\n```"),
    ("hermes", '{"name": "unknown", "arguments": {}}'),
    ("hermes", '{"name": "weather", "arguments": ' + "[" * 5000),
    ("hermes", "```json\n[1]\n```"),
    ("hermes", '{"name": "weather", "description": "d", "parameters": {"type": "object"}}'),
    ("hermes", '{"name": "weather"}'),
    ("hermes", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>'),
    ("hermes", '{"name": "weather", "arguments": {}, "name": {}}'),
    ("hermes", "``"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]weather"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("llama", '{"a": 1}'),
    ("llama", "{ it is a brace"),
    ("llama", f"Text first {WEATHER}"),
    ("llama", "  "),
    (None, '{"name": "weather", "argum'),  # cut by the length
]


def read(form, text, cuts):
    reader = CallReader({"weather"}, form=form)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    shown = "".join(reader.push(text[a:b]) for a, b in pairwise(edges))
    rest, calls = reader.finish()
    return shown + rest, calls


CUTS = st.lists(st.integers(0, 500), max_size=40)


@pytest.mark.parametrize(("form", "text", "shown", "count"), CASES)
@settings(max_examples=12)
@given(cuts=CUTS)
def test_calls_are_found_however_they_come(form, text, shown, count, cuts):
    found, calls = read(form, text, cuts)
    assert found == shown
    assert [call.name for call in calls] == ["weather"] * count
    assert all(json.loads(call.arguments) == ARGUMENTS for call in calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
@settings(max_examples=12)
@given(cuts=CUTS)
def test_nothing_that_was_said_is_lost(form, text, cuts):
    assert read(form, text, cuts) == (text, [])


@pytest.mark.parametrize("form", list(MARKERS))
@settings(max_examples=40)
@given(text=st.text(st.sampled_from('<tool_cal/>[TOOL_CALLS]{}":, |python_tag|'), max_size=80), cuts=CUTS)
def test_any_text_comes_back_whole(form, text, cuts):
    assert read(form, text, cuts) == (text, [])


def test_text_is_shown_as_soon_as_it_is_certain():
    reader = CallReader({"weather"}, form="hermes")
    assert reader.push("Hello <to") == "Hello "
    assert reader.push("day") == "<today"
    reader = CallReader({"weather"}, form="hermes")
    assert reader.push("```") == ""
    assert reader.push("python\n") == "```python\n"
    assert reader.push('{"name": "x"') == '{"name": "x"'
    reader = CallReader({"weather"}, form="hermes")
    assert reader.push('{"name": "Ad') == ""
    assert reader.push('a", "age"') == '{"name": "Ada", "age"'


def test_the_format_is_seen_in_the_template():
    assert find_format("{% if tools %}<tool_call>") == "hermes"
    assert find_format("{% if tools %}[TOOL_CALLS]") == "mistral"
    assert find_format('{% if tools %}{"name": f, "parameters": p}') == "llama"
    assert find_format("{% if tools %}") is None
    assert find_format("<tool_call>") is None


TIME, WEATHER = '{"name": "time", "arguments": {"a": 1}}', '{"name": "weather", "arguments": '
CUT = [
    ("hermes", 'ok <tool_call>{"name": "weather", "argum', "ok ", [("weather", "")]),
    ("hermes", f'<tool_call>{WEATHER}{{"city": "Pa', "", [("weather", '{"city": "Pa')]),
    ("hermes", f"<tool_call>{TIME}</tool", "", [("time", '{"a": 1}')]),
    ("hermes", f"<tool_call>{TIME}</tool_call><tool_call>{WEATHER}", "", [("time", '{"a": 1}'), ("weather", "")]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", f'{WEATHER}{{"city": "Pa', "", [("weather", '{"city": "Pa')]),
    ("hermes", f'```json\n{WEATHER}{{"city": "Pa', "", [("weather", '{"city": "Pa')]),
    ("hermes", f"```json\n{TIME}\n``", "", [("time", '{"a": 1}')]),
    ("hermes", f"{TIME} and", f"{TIME} and", []),
    ("hermes", '{"name": "weather", "description": "long', '{"name": "weather", "description": "long', []),
    ("hermes", f"<tool_call>{TIME} and", f"<tool_call>{TIME} and", []),
    ("mistral", f'[TOOL_CALLS][{TIME}, {{"name": "weather"', "", [("time", '{"a": 1}'), ("weather", "")]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": ', "", [("weather", '{"city": ')]),
    ("llama", '{"name": "weather", "parameters": {"city": "x"', "", [("weather", '{"city": "x"')]),
    ("llama", '{"name": "else", "parameters": {', '{"name": "else", "parameters": {', []),
    (None, f'[{TIME},\n {WEATHER}{{"c', "", [("time", '{"a": 1}'), ("weather", '{"c')]),
    (None, '[{"name": "wea', "", []),
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CUT)
def test_a_cut_answer_ends_with_the_call_it_was_in(form, text, shown, calls):
    reader = CallReader({"weather", "time"}, form=form)
    said = reader.push(text)
    rest, found = reader.finish(cut=True)
    assert (said + rest, [(call.name, call.arguments) for call in found]) == (shown, calls)


@pytest.mark.parametrize("text", ["", "[", '[\n {"na', '{"name": "wea'])
def test_the_only_function_is_known_before_its_name_is_written(text):
    reader = CallReader({"weather"}, form=None)
    assert reader.push(text) == ""
    assert reader.finish(cut=True) == ("", [ParsedCall("weather", "")])
