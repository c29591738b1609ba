"""Log-probabilities of continuations, against the model's logits one pair at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.errors import ConfigError
from hasten.evaluation.likelihood import log_likelihoods
from hasten.model.context import training_context

IDS = st.integers(0, 250)


@pytest.fixture(scope="module")
def llama(tiny_folder):
    return hasten.load(tiny_folder, dtype="stored")


def directly(model, context, continuation):
    """The definition, from the logits of the whole pair in float64."""
    ids = [*context, *continuation]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], training_context(model, len(ids)))[0].double()
    places = range(len(context) - 1, len(ids) - 1)
    nats = sum(float(logits[at].log_softmax(-1)[ids[at + 1]]) for at in places)
    return nats, all(int(logits[at].argmax()) == ids[at + 1] for at in places)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.lists(IDS, min_size=1, max_size=20), st.lists(IDS, max_size=6)), max_size=8))
def test_every_pair_is_that_of_its_logits(llama, pairs):
    for (nats, greedy), pair in zip(log_likelihoods(llama, pairs), pairs, strict=True):
        expected, likely = directly(llama, *pair)
        assert nats == pytest.approx(expected, abs=1e-4)
        assert greedy == likely


def test_what_greedy_decoding_would_say_is_found(llama):
    context = [5, 6, 7]
    answer = hasten.generate(llama, [context], hasten.SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True))
    said = answer[0].tokens
    other = [*said[:-1], (said[-1] + 1) % 250]
    assert [greedy for _, greedy in log_likelihoods(llama, [(context, said), (context, other)])] == [True, False]


def test_answers_of_one_token_to_the_same_question_are_computed_once(llama, monkeypatch):
    counted = []
    states = llama.states

    def counting(tokens, *rest, **named):
        counted.append(tokens.numel())
        return states(tokens, *rest, **named)

    monkeypatch.setattr(llama, "states", counting)
    question = list(range(3, 43))
    pairs = [(question, [answer]) for answer in (3, 4, 5, 6)]
    found = log_likelihoods(llama, pairs)
    assert counted == [len(question)]
    monkeypatch.undo()
    for (nats, _), pair in zip(found, pairs, strict=True):
        assert nats == pytest.approx(directly(llama, *pair)[0], abs=1e-4)


def test_many_batches_say_how_far_they_are(llama, monkeypatch):
    monkeypatch.setattr("hasten.evaluation.likelihood.BATCH_TOKENS", 16)
    monkeypatch.setattr("hasten.evaluation.likelihood.ROWS", 3)
    pairs = [([4 + i] * (1 + 3 * i), [7, 8, 9 + i]) for i in range(7)]
    steps = []
    found = log_likelihoods(llama, pairs, progress=lambda done, whole: steps.append((done, whole)))
    assert len(steps) > 3
    assert steps[-1] == (sum(len(a) + len(b) - 1 for a, b in pairs),) * 2
    for (nats, _), pair in zip(found, pairs, strict=True):
        assert nats == pytest.approx(directly(llama, *pair)[0], abs=1e-4)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (([], [3]), "at least one token"),
        (([3] * 512, [4, 5]), "at most 512; found 512 and 513"),
        (([3], [9999]), "outside the vocabulary"),
        (([9999], [3]), "outside the vocabulary"),
    ],
)
def test_a_pair_that_cannot_be_scored(llama, pair, words):
    with pytest.raises(ConfigError, match=words):
        log_likelihoods(llama, [([3], [4]), pair])
