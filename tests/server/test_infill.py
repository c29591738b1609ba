"""`suffix`: a code model is asked for what is missing between two texts."""

import pytest
import tokenizers

from fake_engine import FakeEngine
from hasten.text.infill import MARKS, infill_marks, infill_prompt
from hasten.text.tokenizer import Tokenizer
from references import tiny_llama

BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(1)"


def marked(marks, **named):
    """A tokenizer with three marks for gaps."""
    backend = tokenizers.Tokenizer.from_str(tiny_llama().tokenizer.backend.to_str())
    backend.add_special_tokens([*marks, *named.values()])
    return Tokenizer.from_tokenizers(backend, **named)


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(marked(MARKS[0]))


@pytest.mark.parametrize("marks", MARKS)
def test_the_two_texts_lie_between_the_marks(marks):
    tokenizer = marked(marks)
    before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, BEHIND))
    asked = infill_prompt(tokenizer, before, behind)
    assert tokenizer.decode(asked, skip_special_tokens=False) == f"{marks[0]}{BEFORE}{marks[1]}{BEHIND}{marks[2]}"
    assert (asked[0], asked[len(before) + 1], asked[-1]) == infill_marks(tokenizer)


def test_it_begins_with_what_begins_every_text():
    tokenizer = marked(MARKS[1], bos_token="<begin>")
    tokenizer.backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", tokenizer.bos_id)]
    )
    assert infill_prompt(tokenizer, [5], [6])[:3] == [tokenizer.bos_id, infill_marks(tokenizer)[0], 5]
    assert infill_marks(tiny_llama().tokenizer) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": BEFORE}),
        ("/v1/completions", {"prompt": [BEFORE], "stream": True}),
        ("/api/generate", {"prompt": BEFORE}),
        ("/api/generate", {"prompt": BEFORE, "raw": True, "stream": False}),
    ],
)
def test_a_suffix_reaches_the_engine(client, engine, path, body):
    answer = client.post(path, json={"model": "tiny", "suffix": BEHIND} | body)
    assert answer.status_code == 200, answer.text
    asked = list(engine.requests[-1].prompt)
    before, behind = (engine.tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, BEHIND))
    assert asked == infill_prompt(engine.tokenizer, before, behind)
    assert set(infill_marks(engine.tokenizer)) <= set(engine.requests[-1].params.stop_token_ids)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": BEFORE, "echo": True}, "suffix"),
        ("/v1/completions", {"prompt": BEFORE, "response_format": {"type": "json_object"}}, "suffix"),
        ("/v1/completions", {"prompt": BEFORE, "suffix": "x" * 100_000}, "suffix"),
        ("/api/generate", {"prompt": BEFORE, "system": "x"}, "system"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, path, body, named):
    answer = client.post(path, json={"model": "tiny", "suffix": BEHIND} | body)
    assert answer.status_code == 400
    said = answer.json()["error"]
    assert named == said["param"] if path.startswith("/v1") else said.startswith(named)


def test_each_text_has_a_gap_and_the_ends_of_the_client_stay(client, engine):
    body = {"model": "tiny", "prompt": [BEFORE, ""], "suffix": BEHIND, "n": 2, "stop_token_ids": [7], "logprobs": 1}
    answer = client.post("/v1/completions", json=body)
    assert len(answer.json()["choices"]) == 4
    first, second = engine.requests[-2:]
    assert len(first.prompt) - len(second.prompt) == len(engine.tokenizer.encode(BEFORE))
    assert 7 in first.params.stop_token_ids


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_tokenizer_without_marks_is_a_400(client_for_all, path):
    answer = client_for_all.post(path, json={"model": "tiny", "prompt": BEFORE, "suffix": BEHIND})
    assert answer.status_code == 400
    assert "<|fim_prefix|>" in answer.text or "does not support insert" in answer.text


def test_a_client_is_told_that_the_model_fills_in(client):
    assert "insert" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
