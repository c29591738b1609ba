"""Scores of pairs, by cosine and by the answer yes or no, against the same computed by transformers."""

from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from hasten.data import train_bpe
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.request import QueueFull
from hasten.engine.settings import EngineSettings
from hasten.server.rerank import pairs_template
from references import tiny_llama, transformers
from server_case import TOOL_TEMPLATE, app_of, serving

PAIRS = (
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} and "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}:"
)
QUERY, DOCUMENTS = "def add(a, b)", ["return a + b", "for name in names", "print", "def add"]
ASK = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def model():
    """A tiny model whose tokenizer has the tokens yes and no."""
    tokenizer = train_bpe(["yes\nno\nreturn a + b\nfor name in names\ndef add(a, b)\n" * 20], vocab_size=300)
    model = tiny_llama(max_position_embeddings=256, vocab_size=tokenizer.vocab_size)
    model.tokenizer = tokenizer
    assert [len(tokenizer.encode(word, add_special_tokens=False)) for word in ("yes", "no")] == [1, 1]
    return model


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    """The same weights in transformers."""
    import hasten

    folder = tmp_path_factory.mktemp("tiny")
    hasten.save(model, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def served(model, template=None, **settings):
    tokenizer = model.tokenizer if template is None else model.tokenizer.with_chat_template(template)
    engine = AsyncEngine(Engine(model, tokenizer, EngineSettings(max_length=256, cache_bytes=1 << 22, block_size=4)))
    return engine, serving(app_of(engine, **settings))


def embedding(reference, tokenizer, text, pooling):
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        states = reference.model(ids).last_hidden_state[0]
    return torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_cosines_are_transformers(model, reference, pooling):
    query, *documents = (embedding(reference, model.tokenizer, text, pooling) for text in (QUERY, *DOCUMENTS))
    wanted = [float(query @ document) for document in documents]
    _, server = served(model, TOOL_TEMPLATE)
    with server as (url, _):
        found = httpx.post(f"{url}/v1/rerank", json=ASK | {"pooling": pooling}).json()
        pairs = {"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS, "pooling": pooling}
        scored = httpx.post(f"{url}/score", json=pairs).json()
    assert (found["method"], scored["method"]) == ("cosine", "cosine")
    by_index = sorted(found["results"], key=lambda result: result["index"])
    assert [result["relevance_score"] for result in by_index] == pytest.approx(wanted, abs=1e-5)
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, abs=1e-5)
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -wanted[index])
    assert [result["index"] for result in found["results"]] == order
    assert [result["document"] for result in found["results"]] == [{"text": DOCUMENTS[index]} for index in order]


def test_answers_are_transformers(model, reference):
    """The probability of yes beside no after the template, and the prompt of the second token is not computed again."""
    tokenizer = model.tokenizer.with_chat_template(PAIRS)
    (yes,), (no,) = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    wanted = []
    for document in DOCUMENTS:
        prompt = tokenizer.encode(f"{QUERY} and {document}:", add_special_tokens=False)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, -1]
        wanted.append(float(torch.sigmoid(logits[yes] - logits[no])))
    engine, server = served(model, PAIRS)
    with server as (url, _):
        found = httpx.post(f"{url}/rerank", json=ASK | {"top_n": 2, "return_documents": False}).json()
        scored = httpx.post(f"{url}/v1/score", json={"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS}).json()
        stats = engine.stats()
    assert found["method"] == scored["method"] == "yes_no"
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, rel=1e-4)
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -wanted[index])[:2]
    assert [result["index"] for result in found["results"]] == order
    assert all(set(result) == {"index", "relevance_score"} for result in found["results"])
    assert stats.free_blocks == stats.blocks
    assert stats.prefix_hits > stats.prefix_queries // 2
    assert found["usage"]["prompt_tokens"] == sum(
        len(tokenizer.encode(f"{QUERY} and {document}:", add_special_tokens=False)) for document in DOCUMENTS
    )


def test_pairs_one_by_one(client):
    one = client.post("/score", json={"model": "tiny", "text_1": "def", "text_2": "def"}).json()
    assert [entry["score"] for entry in one["data"]] == pytest.approx([1.0])
    several = client.post("/score", json={"model": "tiny", "text_1": ["def", "a b"], "text_2": ["a b", "a b"]}).json()
    assert [entry["index"] for entry in several["data"]] == [0, 1]
    assert several["data"][0]["score"] < several["data"][1]["score"] == pytest.approx(1.0)
    assert client.post("/v1/rerank", json=ASK | {"documents": [{"text": "x"}]}).json()["results"][0]["index"] == 0


REFUSED = [
    ("/v1/rerank", {"documents": []}, "documents"),
    ("/v1/rerank", {"documents": ["x"] * 257}, "documents"),
    ("/v1/rerank", {"documents": ["x" * 20_000]}, "documents"),
    ("/v1/rerank", {"query": "x" * 20_000}, "query"),
    ("/v1/rerank", {"query": ""}, "query"),
    ("/v1/rerank", {"top_n": 0}, "top_n"),
    ("/v1/rerank", {"max_tokens_per_doc": 10}, "max_tokens_per_doc"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"text_1": "a", "text_2": ["a"] * 9}, "text_2"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_what_is_wrong_is_refused_by_name(tokenizer, path, fields, param):
    with TestClient(app_of(FakeEngine(tokenizer), choices=8), base_url="http://localhost") as client:
        answer = client.post(path, json=(ASK if "rerank" in path else {"model": "tiny"}) | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


def test_the_template_of_the_page_is_one_of_pairs():
    """It ends as Qwen3-Reranker's own text does, empty lines included."""
    page = (Path(__file__).parents[2] / "docs" / "in-depth" / "server-api.md").read_text()
    source = page.partition("## Rerank and score")[2].split("```\n")[1]
    tokenizer = tiny_llama().tokenizer.with_chat_template(source)
    assert pairs_template(tokenizer.templates["default"], SimpleNamespace(tokenizer=tokenizer))
    messages = [{"role": "query", "content": "Where?"}, {"role": "document", "content": "Here."}]
    text = tokenizer.render_chat(messages)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets")
    assert "\n<Query>: Where?\n<Document>: Here.<|im_end|>\n<|im_start|>assistant\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_reranker_has_no_pooling(model):
    _, server = served(model, PAIRS)
    body = {"model": "tiny", "text_1": "a", "text_2": "b", "pooling": "last"}
    with server as (url, _):
        assert httpx.post(f"{url}/score", json=body).json()["error"]["param"] == "pooling"


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_template_of_other_roles_is_none_of_pairs(model, role):
    """One that writes any role, or names one of the two only, says nothing of pairs."""
    _, server = served(model, f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{{# '{role}' #}}")
    with server as (url, _):
        assert httpx.post(f"{url}/v1/rerank", json=ASK).json()["method"] == "cosine"


def test_a_full_queue_is_said(model):
    engine = FakeEngine(model.tokenizer.with_chat_template(PAIRS))
    engine.refusal = QueueFull("too many", retry_after=2)
    with TestClient(app_of(engine), base_url="http://localhost") as client:
        assert client.post("/v1/rerank", json=ASK).status_code == 429
