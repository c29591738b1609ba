"""Steps that are queued before the tokens of the one before them are read: nobody sees a difference."""

import pytest
import torch

import hasten
from captured_steps import Capturer
from hasten.engine import graphs
from hasten.engine.decoder import Decoder
from hasten.engine.generate import Generation
from hasten.engine.params import SamplingParams
from hasten.machine.host_copy import HostCopy
from references import tiny_llama

MODEL = tiny_llama()
PROMPTS = [[5, 9, 40, 3, 77], [8, 90], [60, 60, 2]]
FREE = SamplingParams(temperature=0.9, top_k=30, seed=3, max_new_tokens=24, ignore_eos=True)


@pytest.fixture
def run_ahead(monkeypatch):
    """Switches it on, on a CPU too."""
    return lambda on=True: monkeypatch.setattr(Decoder, "runs_ahead", on)


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
def test_the_outputs_are_the_same(name, run_ahead):
    expected = hasten.generate(MODEL, PROMPTS, CASES[name])
    run_ahead()
    assert hasten.generate(MODEL, PROMPTS, CASES[name]) == expected


@pytest.mark.parametrize("index", [0, 1, 2, 7, 23])
def test_an_end_that_is_seen_late_is_undone(index, run_ahead):
    params = stops_at(index)
    found = []
    for on in (False, True):
        run_ahead(on)
        run = Generation(MODEL, PROMPTS, params)
        pieces = list(run)
        found.append((pieces, run.results(), run.decoder.lengths))
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_text_that_is_closed_early_leaves_the_cache_as_it_was(count, run_ahead):
    found = []
    for on in (False, True):
        run_ahead(on)
        run = Generation(MODEL, PROMPTS, FREE)
        steps = iter(run)
        pieces = [next(steps) for _ in range(count)]
        steps.close()
        found.append((pieces, run.decoder.lengths))
    assert found[0] == found[1]


def test_a_chat_goes_on_from_a_cache_that_was_run_ahead(run_ahead):
    answers = []
    for on in (False, True):
        run_ahead(on)
        chat = hasten.Chat(MODEL)
        params = SamplingParams(temperature=0, max_new_tokens=12)
        answers.append(["".join(chat.say(text, params)) for text in ("def", "return", "for")])
    assert answers[0] == answers[1]


def test_over_captured_steps(run_ahead, monkeypatch):
    expected = [hasten.generate(MODEL, PROMPTS, params) for params in CASES.values()]
    monkeypatch.setattr(graphs, "refusal", lambda model: None)
    monkeypatch.setattr(graphs, "cuda_graph", Capturer())
    run_ahead()
    assert [hasten.generate(MODEL, PROMPTS, params) for params in CASES.values()] == expected


def test_when_it_runs_ahead(tmp_path):
    from references import make_reference

    assert not Decoder(MODEL, batch=1, capacity=8).runs_ahead, "a CPU has nothing to wait for"
    make_reference("phi3-longrope").save_pretrained(tmp_path)
    assert Decoder(hasten.load(tmp_path, dtype="stored"), batch=1, capacity=8).needs_tokens
    assert torch.equal(HostCopy(torch.tensor([3, 4])).tensor(), torch.tensor([3, 4]))
