"""Training and validation never share a document, and a document stays where it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.documents import Conversation, Document
from hasten.data.sources import open_source
from hasten.data.splits import SplitPlan, plan_split
from hasten.errors import DataError


class Listed:
    """A source of documents in memory."""

    name = "listed"
    skipped = 0
    size = None

    def __init__(self, **documents: str) -> None:
        self.documents = documents

    def items(self):
        return (Document.of_text(name, text) for name, text in self.documents.items())

    def fingerprint(self) -> str:
        return ""


def halves(source, plan: SplitPlan) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {"train": {}, "validation": {}}
    for item in source.items():
        for split, part in plan.parts(item):
            result[split][part.name] = "".join(part.pieces())
    return result


names = st.lists(st.text("abcxyz/._", min_size=1, max_size=6), min_size=2, max_size=40, unique=True)


@given(names, st.integers(-5, 5), st.floats(0.01, 0.99))
def test_no_document_is_in_both_splits_and_none_is_empty(chosen, seed, fraction):
    source = Listed(**{name: f"text of {name}\n" for name in chosen})
    parts = halves(source, plan_split(source, fraction=fraction, seed=seed))
    assert not parts["train"].keys() & parts["validation"].keys()
    assert {**parts["train"], **parts["validation"]} == source.documents
    assert parts["train"]
    assert parts["validation"]


@given(names, names, st.integers(0, 5), st.floats(0.1, 0.9))
def test_a_document_stays_in_its_split_when_others_come(first, more, seed, fraction):
    small = plan_split(Listed(**dict.fromkeys(first, "x")), fraction=fraction, seed=seed)
    large = plan_split(Listed(**dict.fromkeys([*first, *more], "x")), fraction=fraction, seed=seed)
    moved = {plan.moved[0] for plan in (small, large) if plan.moved is not None}
    assert all(small.split_of(name) == large.split_of(name) for name in first if name not in moved)


def test_the_share_held_out_is_about_the_fraction():
    plan = SplitPlan(seed=3, fraction=0.1)
    held_out = sum(plan.split_of(f"document {number}") == "validation" for number in range(10_000))
    assert 900 < held_out < 1100
    assert any(SplitPlan(4, 0.1).split_of(str(n)) != SplitPlan(3, 0.1).split_of(str(n)) for n in range(100))


@given(st.text("ab\né漢", min_size=2, max_size=60).filter(lambda text: "\n" in text[:-1]), st.floats(0.01, 0.99))
def test_a_single_document_is_cut_at_a_line_boundary(text, fraction):
    source = Listed(only=text)
    plan = plan_split(source, fraction=fraction, seed=0)
    parts = halves(source, plan)
    head, tail = parts["train"]["only#train"], parts["validation"]["only#validation"]
    assert head + tail == text
    assert head.endswith("\n")
    assert tail
    assert "at a line boundary" in plan.describe()


@given(st.text("aé漢", min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_a_single_line_is_cut_at_a_character(text, fraction):
    source = Listed(only=text)
    try:
        plan = plan_split(source, fraction=fraction, seed=0)
    except DataError:  # the share is smaller than the last character
        assert fraction * len(text.encode()) <= len(text[-1].encode())
        return
    parts = halves(source, plan)
    assert parts["train"]["only#train"] + parts["validation"]["only#validation"] == text
    assert "character" in plan.describe()


def test_a_single_document_that_comes_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("hasten.data.readers._BLOCK_BYTES", 7)
    path = tmp_path / "one.txt"
    text = "".join(f"line {number} é\n" for number in range(50))
    path.write_text(text, encoding="utf-8")
    source = open_source(str(path))
    parts = halves(source, plan_split(source, fraction=0.1, seed=0))
    head, tail = parts["train"]["one.txt#train"], parts["validation"]["one.txt#validation"]
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.05 < len(tail) / len(text) < 0.12


def test_a_row_without_text_is_no_document(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ""}\n{"text": "one\\ntwo\\nthree\\n"}\n{"text": ""}\n')
    source = open_source(str(path))
    parts = halves(source, plan_split(source, fraction=0.3, seed=0))
    assert "".join([*parts["train"].values(), *parts["validation"].values()]) == "one\ntwo\nthree\n"
    assert all(parts.values())


def test_nothing_is_held_out_at_fraction_zero():
    source = Listed(only="abc\ndef\n")
    assert halves(source, plan_split(source, fraction=0, seed=0)) == {"train": source.documents, "validation": {}}


def test_one_conversation_cannot_be_cut():
    source = Listed(only="")
    source.items = lambda: iter([Conversation("only", ({"role": "assistant", "content": "x"},))])
    with pytest.raises(DataError, match="one conversation"):
        plan_split(source, fraction=0.1, seed=0)
