"""Perplexity: every token after the first of a document is predicted once, with the context that was promised."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.errors import ConfigError
from hasten.evaluation.perplexity import windows
from hasten.model.context import TrainingContext
from hasten.ops.native import library
from references import tiny_llama

MODEL = tiny_llama()


def naive(model, documents):
    """Mean loss with each document in one pass."""
    total, count = 0.0, 0
    context = TrainingContext([layer.window for layer in model.config.layers])
    for tokens in documents:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]), torch.arange(len(tokens) - 1)[None], context)[0]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").item()
        count += len(tokens) - 1
    return math.exp(total / count), count


@given(st.integers(0, 200), st.integers(2, 50), st.data())
def test_windows_score_every_token_after_the_first_once(length, context, data):
    stride = data.draw(st.integers(1, context - 1))
    tokens = torch.arange(length)
    scored = []
    for window in windows(tokens, context=context, stride=stride):
        assert len(window.tokens) <= context
        assert window.first >= 1
        scored += window.tokens[window.first :].tolist()
        if window.tokens[0] > 0:  # not the beginning: the promised context stands before the first scored token
            assert window.first >= context - stride
    assert scored == tokens[1:].tolist()


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(0, 255), min_size=2, max_size=60), min_size=1, max_size=5))
def test_equals_the_plain_loss_where_documents_fit_the_context(documents):
    found = hasten.perplexity(MODEL, documents, context=64)
    expected, count = naive(MODEL, documents)
    assert found.tokens == count
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert found.bits_per_byte is None


def test_texts_have_bits_per_byte():
    texts = ["def add(a, b):\n    return a + b\n", "for é in names: pass"]
    found = hasten.perplexity(MODEL, texts, context=16, stride=4)
    tokens = [MODEL.tokenizer.encode(text) for text in texts]
    assert found.tokens == sum(len(t) - 1 for t in tokens)
    size = sum(len(text.encode()) for text in texts)
    assert found.bits_per_byte == pytest.approx(math.log2(found.perplexity) * found.tokens / size)


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
def test_a_fused_model_is_scored_as_well():
    plain, fused = (tiny_llama().to(torch.bfloat16) for _ in range(2))
    document = [list(range(100))]
    expected = hasten.perplexity(plain, document, context=64).perplexity
    assert hasten.perplexity(hasten.fuse(fused), document, context=64).perplexity == pytest.approx(expected, rel=0.05)


def test_smaller_strides_see_more_context():
    document = [list(range(250)) * 2]
    many, few = (hasten.perplexity(MODEL, document, context=64, stride=stride) for stride in (8, 63))
    assert many.tokens == few.tokens == 499
    assert many.perplexity != few.perplexity


def test_a_stride_of_the_whole_context_means_no_overlap_and_half_the_work(monkeypatch):
    computed = []
    forward = MODEL.forward
    monkeypatch.setattr(
        MODEL, "forward", lambda tokens, *a, **o: computed.append(tokens.numel()) or forward(tokens, *a, **o)
    )
    document = [list(range(250)) * 4]
    overlapping = hasten.perplexity(MODEL, document, context=64)
    work = sum(computed)
    computed.clear()
    apart = hasten.perplexity(MODEL, document, context=64, stride=64)
    assert apart.tokens == overlapping.tokens == 999
    assert apart == hasten.perplexity(MODEL, document, context=64, stride=63)
    assert sum(computed) / 2 < 0.55 * work


def test_documents_of_all_lengths_are_hardly_padded_and_progress_ends_at_the_whole(monkeypatch):
    monkeypatch.setattr("hasten.evaluation.perplexity.BATCH_TOKENS", 256)
    computed, told = [], []
    forward = MODEL.forward
    monkeypatch.setattr(
        MODEL, "forward", lambda tokens, *a, **o: computed.append(tokens.numel()) or forward(tokens, *a, **o)
    )
    documents = [[i % 250] * (2 + 7 * i % 60) for i in range(60)]
    found = hasten.perplexity(MODEL, documents, context=64, progress=lambda done, total: told.append((done, total)))
    assert sum(computed) < 1.2 * found.tokens
    assert max(computed) <= 256
    assert told[-1] == (found.tokens, found.tokens)
    assert told == sorted(told)


@pytest.mark.parametrize(("context", "stride"), [(1, None), (513, None), (64, 65), (64, 0)])
def test_bad_windows_are_refused(context, stride):
    with pytest.raises(ConfigError):
        hasten.perplexity(MODEL, [[1, 2, 3]], context=context, stride=stride)


def test_nothing_to_predict():
    with pytest.raises(ConfigError, match="too short"):
        hasten.perplexity(MODEL, [[1], []])


@pytest.mark.parametrize("documents", ["one text", [[1, 2, -100]], [[1, 10**6]], [1, 2, 3], [[1.5, 2]], [b"abc"]])
def test_documents_of_a_wrong_kind_are_refused(documents):
    with pytest.raises(ConfigError):
        hasten.perplexity(MODEL, documents)


def test_a_fractional_context_is_refused():
    with pytest.raises(ConfigError, match="context"):
        hasten.perplexity(MODEL, [[1, 2, 3]], context=2.5)
