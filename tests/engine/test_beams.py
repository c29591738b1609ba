"""Beam search by forks, against transformers' on tiny models in float32, alone, crowded and starved of blocks."""

import pytest
import torch

import hasten
from references import make_reference
from serving_cases import make_engine, reason_of, request, run, tokens_of

PROMPTS = [[5, 9, 23, 40, 8], list(range(30, 51)), [77, 3]]
SETTINGS = [
    {"beam_width": 2},
    {"beam_width": 4, "n": 4},
    {"beam_width": 3, "n": 2, "length_penalty": 0.0},
    {"beam_width": 4, "n": 2, "length_penalty": 2.0, "early_stopping": True},
    {"beam_width": 5, "n": 5, "length_penalty": -1.0},
    {"beam_width": 6, "n": 3, "early_stopping": True},
    {"beam_width": 1},
]
ENDS = [2, 17, 60]  # some end often


def theirs(reference, prompt, *, max_new_tokens, beam_width, n=1, length_penalty=1.0, early_stopping=False, **more):
    found = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_new_tokens,
        num_beams=beam_width,
        num_return_sequences=n,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        do_sample=False,
        eos_token_id=ENDS,
        pad_token_id=0,
        **more,
    )
    texts = []
    for row in found[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ENDS), len(row))
        texts.append(row[:end])
    return texts


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def pair(request):
    reference = make_reference(request.param)
    reference.generation_config.eos_token_id = None
    return reference, hasten.load(reference, dtype="float32")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_transformers(pair, settings):
    reference, model = pair
    engine = make_engine(model)
    for number, prompt in enumerate(PROMPTS):
        one = request(str(number), prompt, max_new_tokens=12, ignore_eos=True, stop_token_ids=tuple(ENDS), **settings)
        found = run(engine, [one])[str(number)]
        mine = [tokens_of(found, index) for index in range(one.n)]
        if settings["beam_width"] > 1:
            assert mine == theirs(reference, prompt, max_new_tokens=12, **settings)
        else:
            (alone,) = hasten.generate(
                model, prompt, temperature=0, max_new_tokens=12, ignore_eos=True, stop_token_ids=ENDS
            )
            assert mine == [alone.tokens]
        for index, tokens in enumerate(mine):
            assert reason_of(found, index) == ("stop" if tokens[-1] in ENDS else "length")
    stats = engine.stats()
    assert stats.free_blocks == stats.blocks
    if settings["beam_width"] > 1:
        assert stats.copied_blocks > 0


def test_a_minimum_holds_for_beams(pair):
    reference, model = pair
    settings = {"beam_width": 3, "n": 3}
    one = request("a", PROMPTS[0], max_new_tokens=9, min_new_tokens=5, stop_token_ids=tuple(ENDS), **settings)
    found = run(make_engine(model), [one])["a"]
    mine = [tokens_of(found, index) for index in range(3)]
    assert mine == theirs(reference, PROMPTS[0], max_new_tokens=9, min_new_tokens=5, **settings)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_crowded_and_starved_beams_are_the_same(pair, prefix_cache):
    _, model = pair
    wanted = {}
    requests = []
    for number, settings in enumerate(SETTINGS[:4]):
        one = request(str(number), PROMPTS[number % 3], max_new_tokens=14, logprobs=2, **settings)
        requests.append(one)
        wanted[one.id] = run(make_engine(model), [one])[one.id]
    requests = [request(f"plain {i}", PROMPTS[i], max_new_tokens=25) for i in range(3)] + requests
    engine = make_engine(model, blocks=36, prefix_cache=prefix_cache, token_budget=24, max_sequences=24)
    found = run(engine, requests)
    assert engine.stats().preemptions > 0 or model.config.reach is not None, "windows leave their blocks: room enough"
    for name, pieces in wanted.items():
        assert [(p.tokens, p.finish_reason) for p in found[name]] == [(p.tokens, p.finish_reason) for p in pieces]
        for mine, alone in zip(found[name], pieces, strict=True):
            for a, b in zip(mine.logprobs, alone.logprobs, strict=True):
                assert a.token == b.token
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert [t.token for t in a.top] == [t.token for t in b.top]


def test_each_prompt_is_computed_once_and_a_step_one_token_a_beam(pair):
    _, model = pair
    engine = make_engine(model, prefix_cache=False)
    run(engine, [request("a", PROMPTS[1], max_new_tokens=8, beam_width=4)])
    assert engine.stats().computed_tokens == len(PROMPTS[1]) + 4 * 7


def test_texts_that_a_search_does_not_find_end_too(pair):
    _, model = pair
    vocabulary = model.config.vocab_size
    width = vocabulary + 2  # after one token there are no more texts than tokens
    engine = make_engine(model, max_sequences=width, token_budget=width)
    found = run(engine, [request("a", PROMPTS[0], max_new_tokens=1, beam_width=width, n=width)])["a"]
    assert [output.finished for output in found] == [False] * (width - 1) + [True]
    assert [output.finish_reason for output in found] == ["length"] * vocabulary + ["error"] * 2
    assert found[-1].stop_reason == f"the search found {vocabulary} of {width} texts"
    assert engine.stats().failed == 1
