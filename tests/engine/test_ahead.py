"""`generate`, `stream` and `Chat` over captured steps that are launched ahead, as on a GPU: no text changes."""

import pytest
import torch

import hasten
from captured_steps import Capturer
from hasten.engine import captures, following, kept
from hasten.engine.generate import Generation
from hasten.engine.params import SamplingParams
from hasten.model.fused import FusedStack
from hasten.ops.native import library
from references import tiny_llama

MODEL = tiny_llama()
PROMPTS = [[5, 9, 40, 3, 77], [8, 90], [60, 60, 2]]
FREE = SamplingParams(temperature=0.9, top_k=30, seed=3, max_new_tokens=24, ignore_eos=True)


@pytest.fixture
def captured(monkeypatch):
    """Has steps captured, on a CPU too, where texts otherwise lie side by side."""

    def start():
        monkeypatch.setattr("hasten.engine.for_texts._reads_one_tensor", lambda *_: False)
        monkeypatch.setattr(following, "capture_refusal", lambda model: None)
        monkeypatch.setattr(captures, "cuda_graph", Capturer())

    return start


def stops_at(index):
    """Params under which the first prompt ends at its token `index`, and others perhaps elsewhere."""
    tokens = hasten.generate(MODEL, PROMPTS[0], FREE)[0].tokens
    return SamplingParams(temperature=0.9, top_k=30, seed=3, max_new_tokens=24, stop_token_ids=(tokens[index],))


CASES = {
    "free": FREE,
    "greedy": SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True),
    "one token": SamplingParams(temperature=0, max_new_tokens=1),
    "two tokens": SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True),
    "penalties": SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.4, max_new_tokens=20),
    "a least length": SamplingParams(seed=7, min_new_tokens=6, max_new_tokens=30),
    "end of text": SamplingParams(seed=8, temperature=2.0, max_new_tokens=200),
    "a stop string": SamplingParams(seed=9, stop=("e",), max_new_tokens=60),
    "several": [FREE, SamplingParams(temperature=0, max_new_tokens=4), SamplingParams(seed=1, top_p=0.8)],
}


@pytest.mark.parametrize("name", CASES)
def test_the_outputs_are_the_same(name, captured):
    expected = hasten.generate(MODEL, PROMPTS, CASES[name])
    captured()
    assert hasten.generate(MODEL, PROMPTS, CASES[name]) == expected


@pytest.mark.parametrize("index", [0, 1, 2, 7, 23])
def test_an_end_that_is_seen_late_is_undone(index, captured):
    params = stops_at(index)
    plain = Generation(MODEL, PROMPTS, params)
    said = "".join(plain.texts())
    captured()
    run = Generation(MODEL, PROMPTS, params)
    assert run.engine.ahead is not None
    assert sorted("".join(run.texts())) == sorted(said)
    assert run.results() == plain.results()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_text_that_is_closed_early(count, captured):
    whole = hasten.generate(MODEL, PROMPTS[0], FREE)[0]
    captured()
    pieces = hasten.stream(MODEL, PROMPTS[0], FREE)
    said = "".join(next(pieces) for _ in range(count))
    pieces.close()
    assert said
    assert whole.text.startswith(said)


def test_a_chat_goes_on_from_steps_that_were_launched_ahead(captured):
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    answers = []
    for start in (lambda: None, captured):
        start()
        chat = hasten.Chat(MODEL)
        turns = ["".join(chat.say(text, params)) for text in ("def", "return")]
        stopped = chat.say("for", params)
        turns.append(next(stopped))
        stopped.close()
        answers.append([*turns, "".join(chat.say("and on", params))])
    assert answers[0][:2] == answers[1][:2]
    assert answers[0][2:] == answers[1][2:]


@pytest.mark.skipif(library() is None, reason="the fused steps are native")
def test_the_next_text_has_the_captured_steps_of_the_last(monkeypatch):
    """Where the model is fused on a GPU; here its fused steps are native, and captured operation by operation."""
    monkeypatch.setattr(kept, "CudaStack", FusedStack)
    places = [1]
    monkeypatch.setattr(FusedStack, "addresses", lambda stack, model: tuple(places), raising=False)
    monkeypatch.setattr(following, "capture_refusal", lambda model: None)
    monkeypatch.setattr(captures, "cuda_graph", capturer := Capturer())
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    params = SamplingParams(temperature=0.8, frequency_penalty=0.5, seed=2, max_new_tokens=12, ignore_eos=True)
    first = hasten.generate(model, PROMPTS[0], params)
    count = len(capturer.recordings)
    assert hasten.generate(model, PROMPTS[0], params) == first
    assert hasten.generate(model, PROMPTS[2], params) == hasten.generate(model, PROMPTS[2], params)
    assert len(capturer.recordings) == count > 0
    hasten.generate(model, PROMPTS, params)  # another number of sequences
    assert len(capturer.recordings) > count
    count = len(capturer.recordings)
    places[0] = 2  # the weights were moved
    assert hasten.generate(model, PROMPTS[0], params) == first
    assert len(capturer.recordings) > count
    kept.release(model)
    assert model not in kept._KEPT
