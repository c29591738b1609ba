"""The engine against the same requests alone, and how requests end."""

import time

import pytest
import torch

import hasten
from hasten.engine.params import SamplingParams
from hasten.engine.request import EngineFailed, QueueFull, RequestRefused
from hasten.engine.settings import EngineSettings
from hasten.model.context import TrainingContext
from references import tiny_llama
from serving_cases import make_engine, reason_of, request, run, text_of, tokens_of


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


PROMPTS = [list(range(3, 3 + n)) for n in (5, 40, 17, 70)]


@pytest.mark.parametrize(("blocks", "budget"), [(200, 16), (24, 8), (200, 128)])
def test_everybody_gets_what_they_get_alone(model, blocks, budget):
    params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    engine = make_engine(model, blocks=blocks, token_budget=budget)
    found = run(engine, [request(str(i), prompt, params=params) for i, prompt in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        (alone,) = hasten.generate(model, prompt, params)
        assert tokens_of(found[str(i)]) == alone.tokens
        assert text_of(found[str(i)]) == alone.text
        assert reason_of(found[str(i)]) == "length"
    assert engine.stats().preemptions > 0 or blocks > 24
    assert engine.stats().generated_tokens == 80


def test_drawn_texts_are_those_of_the_seed_alone(model):
    engine = make_engine(model)
    settings = [
        {"temperature": 0.8, "seed": 4},
        {"temperature": 1.0, "top_p": 0.7, "seed": 5, "repetition_penalty": 1.3},
        {"temperature": 0, "frequency_penalty": 0.9},
        {"temperature": 1.2, "top_k": 7, "seed": 6, "presence_penalty": 0.5, "logit_bias": {5: 3.0}},
        {"temperature": 0, "min_new_tokens": 6, "ignore_eos": False},
    ]
    all_params = [SamplingParams(max_new_tokens=12, **one) for one in settings]
    requests = [request(str(i), PROMPTS[i % 4], params=params) for i, params in enumerate(all_params)]
    found = run(engine, requests)
    for i, params in enumerate(all_params):
        (alone,) = hasten.generate(model, PROMPTS[i % 4], params)
        assert tokens_of(found[str(i)]) == alone.tokens, settings[i]


def test_samples_share_the_prompt_and_have_seeds_of_their_own(model):
    engine = make_engine(model, block_size=4)
    prompt = PROMPTS[2]  # 17 tokens: the last block is shared and not full
    found = run(engine, [request("a", prompt, temperature=1.0, seed=7, n=3, max_new_tokens=9)])["a"]
    for index in range(3):
        (alone,) = hasten.generate(model, prompt, temperature=1.0, seed=7 + index, max_new_tokens=9, ignore_eos=True)
        assert tokens_of(found, index) == alone.tokens
    stats = engine.stats()
    assert stats.computed_tokens == len(prompt) + 3 * 8
    assert stats.copied_blocks == 2


def test_best_of_gives_the_most_likely_samples(model):
    engine = make_engine(model)
    every = run(engine, [request("a", PROMPTS[0], temperature=1.0, seed=1, n=4, logprobs=0, max_new_tokens=6)])["a"]
    means = {}
    for index in range(4):
        values = [told.logprob for piece in every if piece.index == index for told in piece.logprobs]
        means[tuple(tokens_of(every, index))] = sum(values) / len(values)
    best = run(engine, [request("b", PROMPTS[0], temperature=1.0, seed=1, n=2, best_of=4, max_new_tokens=6)])["b"]
    assert [piece.finish_reason for piece in best] == ["length", "length"]
    ranked = sorted(means, key=lambda tokens: -means[tokens])
    assert [piece.tokens for piece in best] == ranked[:2]
    assert all(piece.logprobs is None for piece in best)


def test_a_cached_prompt_is_not_computed_again(model):
    engine = make_engine(model)
    first = run(engine, [request("a", PROMPTS[3], max_new_tokens=5)])["a"]
    computed = engine.stats().computed_tokens
    again = run(engine, [request("b", PROMPTS[3], max_new_tokens=5)])["b"]
    assert tokens_of(first) == tokens_of(again)
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 68)
    assert engine.stats().computed_tokens - computed == 2 + 4
    other = run(engine, [request("c", PROMPTS[3], max_new_tokens=5, salt="another tenant")])["c"]
    assert other[0].cached_tokens == 0


def test_an_abort_frees_at_once(model):
    engine = make_engine(model)
    engine.add(request("a", PROMPTS[1], max_new_tokens=50, n=2))
    for _ in range(6):
        engine.step()
    assert engine.blocks.free < engine.blocks.blocks
    engine.abort("a")
    assert engine.blocks.free == engine.blocks.blocks
    assert [piece.finish_reason for piece in engine.step()] == ["abort", "abort"]
    assert engine.idle
    engine.abort("a")  # again: nobody


@pytest.mark.parametrize(
    "settings",
    [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"logprobs": 1}, {"stop": ["e", "in"]}, {"ignore_eos": False}],
    ids=str,
)
def test_a_gathered_text_is_one_output_at_its_end(model, settings):
    how = {"max_new_tokens": 40, **settings}
    pieces = run(make_engine(model), [request("a", PROMPTS[1], **how)])["a"]
    whole = run(make_engine(model), [request("a", PROMPTS[1], gathered=True, **how)])["a"]
    assert sorted(piece.index for piece in whole) == list(range(settings.get("n", 1)))
    for one in whole:
        own = [piece for piece in pieces if piece.index == one.index]
        assert one.text == "".join(piece.text for piece in own)
        assert list(one.tokens) == tokens_of(own, one.index)
        assert (one.finish_reason, one.stop_reason) == (own[-1].finish_reason, own[-1].stop_reason)
        logprobs = [token for piece in own for token in piece.logprobs or ()]
        assert one.logprobs == (tuple(logprobs) if "logprobs" in settings else None)
    assert [piece.finished for piece in whole] == [False] * (len(whole) - 1) + [True]


def test_the_budget_follows_the_device_and_the_models_size():
    settings = EngineSettings(max_sequences=16)
    assert settings.on("cpu", weights=10**9).budget == 512
    budgets = [settings.on("cuda", weights=weights).budget for weights in (10**8, 1_034_000_000, 6_600_000_000)]
    assert budgets == [8192, 4096, 2048]
    assert EngineSettings(token_budget=300).on("cuda", weights=10**9).budget == 300
    assert EngineSettings(max_sequences=3000).on("cuda", weights=10**10).budget == 3000


def test_what_was_gathered_is_given_out_when_a_request_is_aborted(model):
    engine = make_engine(model)
    engine.add(request("a", PROMPTS[1], max_new_tokens=50, n=2, gathered=True))
    assert not any(engine.step() for _ in range(9))
    taken = [len(one.generated) for one in engine._table.states["a"].outputs]
    engine.abort("a")
    pieces = engine.step()
    assert [(piece.finish_reason, len(piece.tokens)) for piece in pieces] == [("abort", taken[0]), ("abort", taken[1])]
    alone = run(make_engine(model), [request("a", PROMPTS[1], max_new_tokens=taken[0])])["a"]
    assert list(pieces[0].tokens) == tokens_of(alone)
    assert pieces[0].text
    assert text_of(alone).startswith(pieces[0].text)  # an unfinished character is not shown


def test_a_deadline_ends_a_request(model):
    engine = make_engine(model)
    engine.add(request("a", PROMPTS[1], max_new_tokens=200, timeout=1e-6))
    (piece,) = run(engine)["a"]
    assert (piece.finish_reason, piece.stop_reason) == ("abort", "timeout")


def test_a_failed_step_ends_everybody_and_leaks_nothing(model, monkeypatch):
    engine = make_engine(model)
    engine.add(request("a", PROMPTS[1], max_new_tokens=50))
    for _ in range(4):
        engine.step()
    engine.add(request("b", PROMPTS[0], max_new_tokens=50, n=2))

    def fail(*args, **kwargs):
        raise RuntimeError("a kernel gave up")

    monkeypatch.setattr(model, "forward", fail)
    pieces = engine.step()
    assert sorted(piece.request_id for piece in pieces) == ["a", "b", "b"]
    assert all(piece.finish_reason == "error" and "a kernel gave up" in piece.stop_reason for piece in pieces)
    assert engine.idle
    engine.check()
    assert "a kernel gave up" in engine.error
    with pytest.raises(EngineFailed, match="a kernel gave up"):
        engine.add(request("c", PROMPTS[0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 400}, "need 101 blocks of 4 tokens; the cache has 50"),
        ({"n": 9}, "9 samples"),
        ({"n": 3, "best_of": 2}, "best_of is 2"),
        ({"beam_width": 2, "n": 3}, "n is 3"),
        ({"beam_width": 2, "top_k": 3}, "leave top_k out"),
        ({"beam_width": 2, "stop": ("x",)}, "leave stop out"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"beam_width": 8, "max_new_tokens": 40}, "need 81 blocks"),
    ],
)
def test_what_can_never_be_served_is_refused_with_numbers(model, settings, message):
    engine = make_engine(model, blocks=50)
    with pytest.raises(RequestRefused, match=message):
        engine.add(request("a", PROMPTS[0], **settings))
    assert engine.idle


def test_prompts_out_of_range_are_refused(model):
    engine = make_engine(model, max_length=64)
    with pytest.raises(RequestRefused, match="no tokens"):
        engine.add(request("a", []))
    with pytest.raises(RequestRefused, match="outside the vocabulary"):
        engine.add(request("a", [100000]))
    with pytest.raises(RequestRefused, match="64 together"):
        engine.add(request("a", PROMPTS[3]))
    found = run(engine, [request("a", PROMPTS[1], max_new_tokens=100)])["a"]
    assert len(tokens_of(found)) == 64 - 40
    engine.add(request("a", PROMPTS[0]))
    with pytest.raises(RequestRefused, match="in flight"):
        engine.add(request("a", PROMPTS[0]))


def test_the_queue_is_bounded(model):
    engine = make_engine(model, queue_limit=2)
    for name in "ab":
        engine.add(request(name, PROMPTS[0]))
    with pytest.raises(QueueFull, match="the limit is 2") as refusal:
        engine.add(request("c", PROMPTS[0]))
    assert refusal.value.retry_after >= 1


def test_stop_strings_and_ids_are_named(model):
    (alone,) = hasten.generate(model, PROMPTS[0], temperature=0, max_new_tokens=20, ignore_eos=True)
    last = alone.tokens[5]
    engine = make_engine(model)
    found = run(engine, [request("a", PROMPTS[0], max_new_tokens=20, stop_token_ids=(last,))])["a"]
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", last)
    assert tokens_of(found) == alone.tokens[: alone.tokens.index(last) + 1]
    mark = alone.text[6:8]
    found = run(engine, [request("b", PROMPTS[0], max_new_tokens=20, stop=(mark,))])["b"]
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", mark)
    assert text_of(found) == alone.text[: alone.text.index(mark)]


def test_embeddings_are_the_states_before_the_head(model):
    engine = make_engine(model)
    last, mean = (engine.embed(PROMPTS[0], pooling=pooling) for pooling in ("last", "mean"))
    scores = model(torch.tensor([PROMPTS[0]]), torch.arange(5)[None], TrainingContext([None] * 2))[0]
    torch.testing.assert_close(model.logits(last), scores[-1])
    torch.testing.assert_close(model.logits(mean), scores.mean(0))
    with pytest.raises(RequestRefused, match="pooling is 'max'"):
        engine.embed(PROMPTS[0], pooling="max")
    with pytest.raises(RequestRefused, match="has 0 tokens"):
        engine.embed([])


def test_deadlines_of_requests_that_ended_are_forgotten(model):
    engine = make_engine(model)
    for number in range(300):
        run(engine, [request(str(number), [3, 4], max_new_tokens=1, timeout=3600.0)], check=False)
    assert not engine._table.states
    engine.add(request("late", [3, 4], max_new_tokens=400, timeout=0.001))
    for number in range(300, 400):  # whoever comes and goes, those that still run keep theirs
        engine.add(request(str(number), [3, 4], max_new_tokens=1, timeout=3600.0))
        engine.abort(str(number))
    time.sleep(0.002)
    assert {piece.stop_reason for piece in engine.step() if piece.request_id == "late"} == {"timeout"}


def test_the_first_failure_is_the_one_that_is_told(model):
    engine = make_engine(model)
    for words in ("the cause", "what came of it"):
        engine.fail(ValueError(words))
    assert engine.error == "ValueError: the cause"
