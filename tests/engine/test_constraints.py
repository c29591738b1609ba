"""Structured output: masks before the draw, each sample with its own state, failures that stay with their request."""

import pytest

from references import tiny_llama
from serving_cases import Counting, make_engine, reason_of, request, run, tokens_of


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def test_only_allowed_tokens_come_and_the_end_is_a_stop(model):
    engine = make_engine(model)
    free = run(engine, [request("free", range(5, 12), max_new_tokens=9)])["free"]
    found = run(
        engine,
        [
            request("bound", range(5, 12), max_new_tokens=9, constraint=Counting(40, 4)),
            request("free", range(5, 12), max_new_tokens=9),
            request("three", range(5, 12), max_new_tokens=9, n=3, temperature=1.0, constraint=Counting(60, 5)),
        ],
    )
    assert tokens_of(found["bound"]) == [40, 41, 42, 43]
    assert reason_of(found["bound"]) == "stop"
    assert tokens_of(found["free"]) == tokens_of(free)
    for index in range(3):
        assert tokens_of(found["three"], index) == [60, 61, 62, 63, 64]


def test_log_probabilities_are_those_before_the_mask(model):
    engine = make_engine(model)
    one = request("a", range(5, 12), max_new_tokens=1, logprobs=1, constraint=Counting(40, 4))
    (piece,) = run(engine, [one])["a"]
    free = run(engine, [request("b", range(5, 12), max_new_tokens=1, logprobs=1)])["b"][0]
    (mine,), (theirs,) = piece.logprobs[0].top, free.logprobs[0].top
    assert (mine.token, mine.logprob) == (theirs.token, pytest.approx(theirs.logprob, abs=1e-4))
    assert piece.logprobs[0].logprob <= free.logprobs[0].logprob


def test_a_constraint_that_allows_nothing_fails_its_own_request(model):
    engine = make_engine(model)
    alone = run(engine, [request("b", range(5, 12), max_new_tokens=6)])["b"]
    found = run(
        engine,
        [
            request("a", range(3, 12), max_new_tokens=9, constraint=Counting(40, 9, broken_at=2)),
            request("b", range(5, 12), max_new_tokens=6),
        ],
    )
    assert reason_of(found["a"]) == "error"
    assert "allows no token" in found["a"][-1].stop_reason
    assert tokens_of(found["a"]) == [40, 41]
    assert tokens_of(found["b"]) == tokens_of(alone)
    assert engine.error is None
    assert engine.stats().failed == 1


def test_a_constraint_that_raises_fails_its_own_request(model):
    class Raising(Counting):
        def mask(self, row):
            pass  # so that a token comes which `advance` refuses

    engine = make_engine(model)
    one = request("a", range(5, 12), max_new_tokens=9, logit_bias={7: 50.0}, constraint=Raising(40, 9))
    found = run(engine, [one])["a"]
    assert (reason_of(found), found[-1].stop_reason) == ("error", "7 was not allowed")
    assert engine.error is None
