"""Steps launched ahead, with requests that come and go at random: everybody has the text that they have alone."""

import functools
import random

import pytest

import hasten
from captured_steps import Capturer
from hasten.engine import ahead as serving_ahead
from hasten.engine import captures, following
from hasten.engine.params import SamplingParams
from references import make_reference
from serving_cases import make_engine, request, tokens_of

TEXT = [7, 3, 90, 41, 12, 55, 8, 8, 23, 60, 71, 5, 33, 18, 99, 2, 64, 29, 77, 50] * 4


@functools.cache
def model_of(name):
    return hasten.load(make_reference(name), dtype="float32")


@functools.cache
def alone(name, prompt, params):
    return hasten.generate(model_of(name), list(prompt), params)[0].tokens


def params_of(chance):
    drawn = chance.choice(
        [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}, {"top_k": 9, "frequency_penalty": 0.6}]
    )
    return {"max_new_tokens": chance.randrange(1, 30), "ignore_eos": chance.random() < 0.7} | drawn


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_everybody_gets_what_they_get_alone(name, seed, monkeypatch):
    monkeypatch.setattr(following, "capture_refusal", lambda model: None)
    monkeypatch.setattr(captures, "cuda_graph", Capturer())
    monkeypatch.setattr(serving_ahead, "_SHORT", 1e9)
    chance = random.Random(seed)
    engine = make_engine(
        model_of(name),
        blocks=chance.randrange(24, 60),
        token_budget=chance.randrange(8, 40),
        max_sequences=chance.choice([3, 6, 8]),
        prefix_cache=chance.random() < 0.7,
    )
    wanted, found, ahead, late = {}, {}, 0, 0

    def step():
        nonlocal ahead, late
        for piece in engine.step():
            found.setdefault(piece.request_id, []).append(piece)
        engine.check()
        ahead += engine.ahead.flight is not None
        late += engine.ahead.late is not None

    for number in range(chance.randrange(4, 12)):
        own = [1 + (7 * number + i) % 100 for i in range(chance.randrange(1, 20))]
        prompt, n = (*TEXT[: chance.randrange(0, 40)], *own), chance.choice([1, 1, 3])
        values = params_of(chance)
        engine.add(
            request(
                f"{number}", prompt, params=SamplingParams(seed=5, **values), n=n, priority=chance.choice([0, 0, 1])
            )
        )
        wanted[f"{number}"] = [alone(name, prompt, SamplingParams(seed=5 + i, **values)) for i in range(n)]
        for _ in range(chance.choice([0, 1, 4, 15])):
            step()
        if chance.random() < 0.15:
            gone = chance.choice(list(wanted))
            engine.abort(gone)
            wanted.pop(gone)
    while not engine.idle:
        step()
    assert {key: [tokens_of(found[key], i) for i in range(len(texts))] for key, texts in wanted.items()} == wanted
    assert engine.blocks.free == engine.blocks.blocks
    assert ahead
    assert late
    assert not engine.runner.decoder.captures.refused
