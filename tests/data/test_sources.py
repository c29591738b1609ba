"""Finding and reading text, and saying clearly what is wrong with what cannot be read."""

import json
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest

from hasten.data.documents import Conversation
from hasten.data.readers import read_text
from hasten.data.sources import open_source
from hasten.errors import DataError, ResourceError


def texts(source: str, **options) -> dict[str, str]:
    return {item.name: "".join(item.pieces()) for item in open_source(source, **options).items()}


def write_jsonl(path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_the_standard_library_is_real_text_in_a_fixed_order():
    source = open_source("stdlib")
    names = [item.name for item in source.items()]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert source.size > 3_000_000
    assert names == [item.name for item in source.items()]


def test_the_standard_library_counts_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*- \xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_good.py").write_text("assert True\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    source = open_source("stdlib")
    assert ([item.name for item in source.items()], source.skipped) == (["good.py"], 1)
    (tmp_path / "good.py").unlink()
    with pytest.raises(DataError, match="no standard library sources"):
        open_source("stdlib")


def test_a_file_a_folder_and_a_glob(corpus):
    assert list(texts(str(corpus / "02.md"))) == ["02.md"]
    whole = texts(str(corpus))
    assert len(whole) == 40
    assert "deeper/00.txt" in whole
    assert whole["02.md"] == (corpus / "02.md").read_text(encoding="utf-8")
    assert texts(str(corpus / "**" / "*.txt")) == {name: text for name, text in whole.items() if name.endswith(".txt")}


def test_other_files_and_hidden_ones_of_a_folder_are_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "b.txt").write_text("b")
    assert texts(str(tmp_path)) == {"a.txt": "a"}


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert texts(str(path)) == {"windows.txt": "one\r\ntwo\n"}


def test_a_character_across_the_border_of_two_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("hasten.data.readers._BLOCK_BYTES", 5)
    path = tmp_path / "wide.txt"
    path.write_text("漢字漢字é漢\n", encoding="utf-8")
    assert "".join(read_text(path)) == "漢字漢字é漢\n"
    path.write_bytes("漢字".encode() + b"\xff" + b"more")
    with pytest.raises(DataError, match="byte 6"):
        list(read_text(path))


def test_json_lines(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "two", "more": 1})
    with open(source, "a") as file:
        file.write("\n")
    assert texts(source) == {"a.jsonl:1": "one", "a.jsonl:3": "two"}
    body = write_jsonl(tmp_path / "b.jsonl", {"body": "one"})
    assert texts(body, text_field="body") == {"b.jsonl:1": "one"}


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "other": [1, 2, 3]}), path)
    assert texts(str(path)) == {"a.parquet:1": "one", "a.parquet:3": "two"}
    with pytest.raises(DataError, match=r"a\.parquet: has no column 'body' \(found: text, other\)"):
        texts(str(path), text_field="body")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"a\.parquet"):
        texts(str(path))


def test_chats_in_json_lines_and_parquet(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    source = write_jsonl(tmp_path / "chat.jsonl", {"messages": messages, "text": "rendered by somebody else"})
    table = pyarrow.table({"messages": [messages], "id": [1]})
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    for place in (source, str(tmp_path / "chat.parquet")):
        (item,) = open_source(place).items()
        assert isinstance(item, Conversation)
        assert list(item.messages) == messages


QUESTION, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
ALPACA = {"instruction": "add", "input": "1 2", "output": "3"}
SHARE_GPT = {"system": "be kind", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("suffix", ["json", "jsonl", "lines.json", "parquet"])
@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"messages": [QUESTION, ANSWER], "text": "rendered by somebody else"}, [QUESTION, ANSWER]),
        (ALPACA, [{"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]),
        (
            ALPACA | {"input": "", "text": "x"},
            [{"role": "user", "content": "add"}, {"role": "assistant", "content": "3"}],
        ),
        (SHARE_GPT, [{"role": "system", "content": "be kind"}, QUESTION, ANSWER]),
        ({"conversations": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
    ],
)
def test_conversations_of_all_kinds_and_files(tmp_path, suffix, record, wanted):
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record, record]), path)
    else:
        line = json.dumps(record)
        path.write_text(f"[{line},\n {line}]" if suffix == "json" else f"{line}\n{line}\n", encoding="utf-8")
    items = list(open_source(str(path)).items())
    assert [list(item.messages) for item in items] == [wanted, wanted]
    assert [item.name for item in items] == [f"a.{suffix}:1", f"a.{suffix}:2"]


def test_messages_come_as_the_server_takes_them(tmp_path):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    record = {
        "messages": [
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
            {"role": "tool", "content": "2", "tool_calls": None},
        ],
        "tools": json.dumps([TOOL]),
    }
    (item,) = open_source(write_jsonl(tmp_path / "a.jsonl", record)).items()
    called = {"id": "", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert list(item.messages) == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2"},
    ]
    assert item.tools == (TOOL,)


def test_a_text_field_that_is_named_is_taken(tmp_path):
    assert texts(write_jsonl(tmp_path / "a.jsonl", ALPACA), text_field="output") == {"a.jsonl:1": "3"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", r"a\.json, item 1: is 1, expected an object"),
        ('{\n"data": []\n}', r"a\.json: is an object with 'data'; expected a list of objects"),
        (
            '[{"prompt": "x", "completion": "y"}]',
            r"has no field 'text' \(found: completion, prompt\).*--data\.text-field.*'instruction'",
        ),
        (
            '{"data": [{"instruction": "x", "output": "y"}]}',
            r"a\.json: is an object with 'data' \(write the list in 'data' alone\); expected a list of objects",
        ),
        ("[{]", r"a\.json: is not JSON"),
        ('"x"', r"a\.json: is 'x'; expected a list"),
        ('[{"conversations": [{"from": "observation", "value": "x"}]}]', r"is from 'observation'; known are human"),
        ('[{"conversations": [{"from": "human"}]}]', r"conversations\[0\] must be an object with 'from' and 'value'"),
        ('[{"messages": [{"role": "assistant", "content": null}]}]', r"messages\[0\] must have text or text parts"),
        ('[{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]', r"content\[0\] must be .*'text'"),
        ('[{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}]', r"tool_calls\[0\] must be an obj"),
    ],
)
def test_json_that_holds_something_else_is_refused(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        list(open_source(str(path)).items())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"bad\.jsonl, line 2: is not JSON"),
        ('"a string"', r"bad\.jsonl, line 2: .*expected a JSON object"),
        ('{"body": "x"}', r"bad\.jsonl, line 2: has no field 'text' \(found: body\)"),
        ('{"text": 7}', r"bad\.jsonl, line 2: .*is a int, expected text"),
        ('{"text": "\\ud800"}', r"bad\.jsonl, line 2: .*half a surrogate pair"),
        ('{"messages": []}', r"bad\.jsonl, line 2: 'messages' must be a list"),
        ('{"messages": "hi"}', r"bad\.jsonl, line 2: 'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', r"bad\.jsonl, line 2: messages\[0\]"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"bad\.jsonl, line 2: no message has the role 'assist"),
        ("[" * 100_000, r"bad\.jsonl, line 2: is not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(open_source(str(path)).items())


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: is not JSON"):
        list(open_source(str(path)).items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\0def", "is a binary file.*byte 3"),
        (b"abc\xff", "is not UTF-8 text.*byte 3"),
        (b"ab\xe6\xbc", "is not.*byte 2"),
    ],
)
def test_binary_files_are_named_with_the_position(tmp_path, content, message):
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"odd.txt: {message}"):
        texts(str(path))


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")  # permissions do not stop root
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read \(No such file"):
        texts(str(tmp_path))


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_name_is_not_the_current_folder(source, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the name of the text is empty"):
        open_source(source)


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match=r"has no \.txt"):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match="no file matches this pattern"):
        open_source(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="no such file or folder"):
        open_source("nothing-here")
    with pytest.raises(DataError, match="no such file or folder"):
        open_source("data/missing.txt")


def test_a_device_is_refused():
    with pytest.raises(DataError, match="neither a file nor a folder"):
        open_source("/dev/null")


def test_a_limit_takes_the_first_documents_and_cuts_at_a_line(tmp_path):
    for name, text in (("a", "12345\n"), ("b", "abc\ndéf\nghi\n"), ("c", "never")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    assert texts(str(tmp_path), limit_bytes=6) == {"a.txt": "12345\n"}
    assert texts(str(tmp_path), limit_bytes=16) == {"a.txt": "12345\n", "b.txt": "abc\ndéf\n"}
    assert texts(str(tmp_path), limit_bytes=3) == {"a.txt": "123"}
    assert len(texts(str(tmp_path), limit_bytes=10_000)) == 3


def test_the_fingerprint_follows_contents_and_names_but_not_the_place_or_the_time(tmp_path):
    def fingerprint(place: str, **files: str) -> str:
        (tmp_path / place).mkdir()
        for name, text in files.items():
            (tmp_path / place / f"{name}.txt").write_text(text)
        return open_source(str(tmp_path / place)).fingerprint()

    first = fingerprint("1", a="one", b="two")
    assert fingerprint("2", a="one", b="two") == first
    assert fingerprint("3", a="one", b="too") != first
    assert fingerprint("4", a="one", c="two") != first
    assert fingerprint("5", a="onet", b="wo") != first


def test_a_large_source_is_known_by_sizes_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr("hasten.data.sources.HASHED_BYTES", 3)
    path = tmp_path / "a.txt"
    path.write_text("four")
    import os

    os.utime(path, ns=(1, 1))
    first = open_source(str(path)).fingerprint()
    assert open_source(str(path)).fingerprint() == first
    os.utime(path, ns=(1, 2))
    assert open_source(str(path)).fingerprint() != first


class FakeRows(list):
    column_names = ("text", "id")


def fake_datasets(monkeypatch, load) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_a_hub_data_set_is_loaded_through_datasets(monkeypatch):
    asked = []

    def load(identifier, *, split):
        asked.append((identifier, split))
        return FakeRows([{"text": "one", "id": 1}, {"text": "two", "id": 2}])

    fake_datasets(monkeypatch, load)
    assert texts("hf:owner/name:test") == {"owner/name:test:1": "one", "owner/name:test:2": "two"}
    assert texts("owner/name") == {"owner/name:1": "one", "owner/name:2": "two"}
    assert asked == [("owner/name", "test"), ("owner/name", "train")]
    with pytest.raises(DataError, match=r"no column 'body' \(found: text, id\)"):
        open_source("hf:owner/name", text_field="body")


def test_a_hub_data_set_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hf:owner/name", "owner/name"):
        with pytest.raises(ResourceError, match=r"pip install hasten\[datasets\]"):
            open_source(source)


def test_a_hub_data_set_that_cannot_be_loaded(monkeypatch):
    def load(identifier, *, split):
        raise ConnectionError("no route to the hub")

    fake_datasets(monkeypatch, load)
    with pytest.raises(ResourceError, match=r"hf:owner/name.*no route to the hub"):
        open_source("hf:owner/name")
