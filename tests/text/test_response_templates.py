"""What a tokenizer's response_template declares is translated into markers, and its patterns are never run."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.text.answer_format import AnswerFormat
from hasten.text.answer_reader import AnswerReader, TemplateCallReader
from hasten.text.response_template import read_response_template
from tokenizer_folders import FAST, byte_level, load, write

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ARGUMENTS = {"city": "Rome", "days": 3}
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
CONTENT = {"close_pattern": r"<\|end\|>\s*", "content": "text"}
PAIRS = r"<p=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</p>"
CASES = {  # the field of calls, and a call
    "whole object": (
        {"open": "<call>", "close_pattern": r"</call>\s*", "content": "json", "transform": {"function": "{content}"}},
        '<call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</call>',
    ),
    "object behind a name": (
        {"open_pattern": r"\[CALL\](?P<name>\w+)\[ARGS\]", "close": "[END]", "content": "json", "transform": FUNCTION},
        '[CALL]weather[ARGS]{"city": "Rome", "days": 3}[END]',
    ),
    "tags": (
        {
            "open_pattern": r"<call>\s*<f=(?P<name>[^\n>)]+)>",
            "close_pattern": r"</call>\s*",
            "content": "xml-inline",
            "content_args": {"tag_pattern": PAIRS},
        },
        "<call>\n<f=weather>\n<p=city>\nRome\n</p>\n<p=days>\n3\n</p>\n</f>\n</call>",
    ),
    "bare keys": (
        {
            "open_pattern": r"<\|call>call:(?P<name>\w+)",
            "close_pattern": r"<call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [["<|q|>", "<|q|>"]], "unquoted_keys": True},
        },
        "<|call>call:weather{city:<|q|>Rome<|q|>,days:3}<call|>",
    ),
}


def declared(calls):
    return {"version": 1, "fields": {"reasoning_content": THOUGHT, "tool_calls": calls, "content": CONTENT}}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_as_declared_cut_anywhere(name):
    field, call = CASES[name]
    form = read_response_template(declared(field))
    answer = f"<think>\nHm.\n</think>\n\nI look. {call}\n{call}"
    for cut in range(len(answer)):
        reader = AnswerReader(form, prompt="", calls=TemplateCallReader(form.calls, {"weather": SCHEMA}))
        found = [reader.push(answer[:cut]), reader.push(answer[cut:]), reader.finish()]
        assert "".join(piece.reasoning for piece in found) == "Hm."
        assert "".join(piece.content for piece in found).strip() == "I look."
        calls = [piece for one in found for piece in one.calls]
        assert [piece.name for piece in calls if piece.name is not None] == ["weather"] * 2
        for index in (0, 1):
            arguments = "".join(piece.arguments for piece in calls if piece.index == index)
            assert json.loads(arguments) == ARGUMENTS


PATTERNS = [
    r"(a+)+$",
    r"(?=[\s\S]*?</think>)",
    r"(?:<a>|<b>)(?P<name>\w+)",
    r"<call>(?P<name>(\w+)+)",
    r"<call>(?P<name>\w+",
    r"<ca*ll>(?P<name>\w+)",
    r"<call>(?P<name>\w+)*",
    r"<call>(?P<value>\w+)",
    r"(?P<name>\w+)",
    r"<call>.(?P<name>\w+)",
    r"\d",
    "x" * 2000,
    "\\",
    7,
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_says_more_is_left_out(pattern):
    field = {"open_pattern": pattern, "close": "</call>", "content": "json"}
    form = read_response_template(declared(field))
    assert form.calls is None
    assert form.reasoning is not None


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(PATTERNS[:8]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*CASES["tags"][0], "x"]), inner),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(thought=VALUES, calls=VALUES, fields=VALUES)
def test_no_declaration_fails(thought, calls, fields):
    for given_value in (fields, {"fields": fields}, {"fields": {"thinking": thought, "tool_calls": calls}}):
        assert isinstance(read_response_template(given_value), AnswerFormat)


def test_a_folder_brings_its_declaration(tmp_path):
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"response_template": declared(CASES["tags"][0])})
    tokenizer = load(tmp_path)
    assert read_response_template(tokenizer.response_template).calls is not None
    assert tokenizer.with_chat_template("x").response_template is None
