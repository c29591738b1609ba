"""The engine with drafts: every answer is the one without, whatever its settings, and is counted."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

import hasten
from drafting import proposing, wrong
from hasten.engine.params import SamplingParams
from hasten.engine.sampling import RowParams, process
from hasten.engine.speculation import Speculator, make_speculator
from hasten.model.context import TrainingContext
from hasten.model.fused import refusal
from hasten.server.settings import ServerSettings
from hasten.server.structured import Grammars
from references import tiny_llama
from serving_cases import Counting, make_engine, request, run, tokens_of

PROMPT = [5, 9, 13, 9, 13, 7, 9, 13]
KINDS = {
    "greedy": {},
    "draws": {"temperature": 1.0, "seed": 5},
    "filters": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 7},
    "bias": {"logit_bias": {9: 4.0}, "temperature": 0.7, "seed": 8},
    "stop string": {"stop": (")-)",), "logit_bias": {9: 12.0, 13: 12.0}, "temperature": 1.0, "seed": 21},
    "minimum": {"min_new_tokens": 9, "stop_token_ids": tuple(range(0, 300, 3)), "temperature": 1.0, "seed": 9},
    "end of text": {"ignore_eos": False, "logit_bias": {90: 4.0}, "temperature": 1.0, "seed": 16},
    "samples": {"n": 3, "temperature": 1.0, "seed": 10, "presence_penalty": 0.4},
    "best of": {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 11},
    "logprobs": {"logprobs": 3, "temperature": 0.9, "seed": 12},
    "constraint": {"constraint": Counting(40, 9)},
    "broken constraint": {"constraint": Counting(60, 9, broken_at=4)},
    "constraint, samples": {"constraint": Counting(80, 7), "n": 2, "temperature": 1.0, "seed": 13, "logprobs": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
    "beams": {"beam_width": 3, "n": 2},
}


@pytest.fixture(scope="module")
def model():
    model = tiny_llama()
    model.generation = {"eos_token_id": 90}
    return model


def requests():
    found = []
    for name, own in KINDS.items():
        own = {"ignore_eos": True, **own}
        if "constraint" in own:
            own["constraint"] = own["constraint"].fork()
        found.append(request(name, PROMPT, max_new_tokens=14, **own))
    return found


def said(pieces):
    """What came of each sample, however it was cut into pieces."""
    found = {}
    for piece in pieces:
        one = found.setdefault(piece.index, [[], "", [], None, None])
        one[0] += piece.tokens
        one[1] += piece.text
        one[2] += [(told.token, round(told.logprob, 4)) for told in piece.logprobs or ()]
        one[3:] = piece.finish_reason, piece.stop_reason
    return found


@pytest.mark.parametrize(("blocks", "cache"), [(200, "auto"), (20, "auto"), (20, "int8"), (20, "int4")])
def test_answers_are_those_without_drafts(model, blocks, cache):
    check_answers(model, blocks, cache)


NATIVE = [("bfloat16", "auto"), ("int8", "auto"), ("int4", "auto")]
NATIVE += [("bfloat16", "int8"), ("int8", "int8"), ("int4", "int4")]


@pytest.mark.parametrize(("weights", "cache"), NATIVE)
def test_answers_by_the_native_kernels_are_those_without_drafts(weights, cache):
    model = tiny_llama().bfloat16()
    model.generation = {"eos_token_id": 90}
    if weights != "bfloat16":
        hasten.quantize(model, hasten.Int8() if weights == "int8" else hasten.Int4(group_size=32))
    if reason := refusal(model):
        pytest.skip(reason)
    check_answers(hasten.fuse(model), 20, cache)


def check_answers(model, blocks, cache):
    """Beside each other, with preemption (20 blocks), drafts with mistakes that run past ends and constraints."""
    plain = {name: said(pieces) for name, pieces in run(make_engine(model, kv_cache_dtype=cache), requests()).items()}
    assert 1 < len(plain["end of text"][0][0]) < 14
    assert plain["stop string"][0][3] == "stop", "it ends at a string, and the drafts run past it"
    answers = [sample[0] for samples in plain.values() for sample in samples.values()]
    texts = [PROMPT + tokens + [7] * (14 - len(tokens)) for tokens in answers]  # drafts run past the end of a text
    texts += [PROMPT + list(range(first, first + 14)) for first in (40, 60, 80)]  # past the constraints' ends
    chance = random.Random(0)

    def propose(text):
        known = [one[len(text.tokens) :] for one in texts if one[: len(text.tokens)] == list(text.tokens)]
        draft = chance.choice(known)[: chance.randrange(6)] if known else []
        return [*draft, 7] if chance.random() < 0.3 else draft

    engine = make_engine(model, blocks=blocks, token_budget=48, kv_cache_dtype=cache)
    engine.speculator = proposing(propose)
    found = {name: said(pieces) for name, pieces in run(engine, requests()).items()}
    assert found == plain
    stats = engine.stats()
    assert (stats.preemptions > 0) == (blocks == 20)
    assert stats.prefix_hits > 0
    assert stats.tokens_per_step > 1
    assert 0 < stats.active <= 1
    assert stats.draft_tokens > stats.accepted_tokens > 40
    assert sum(stats.accepted_by_position) == stats.accepted_tokens


def test_answers_go_on_where_drafts_are_hardly_made(model, monkeypatch):
    """Of drafts that are always wrong: most steps have none, some are tried, and answers end in both."""
    long = [request(str(n), PROMPT, max_new_tokens=90 + 50 * n, temperature=0.8, seed=n) for n in range(3)]
    plain = {name: said(pieces) for name, pieces in run(make_engine(model), long).items()}
    engine = make_engine(model)
    engine.speculator = wrong(monkeypatch)
    assert {name: said(pieces) for name, pieces in run(engine, long).items()} == plain
    stats = engine.speculator.stats
    assert 0 < stats.drafts < stats.steps / 4
    assert stats.steps == engine.stats().steps
    assert stats.tokens == 90 + 140 + 190
    assert len(engine.speculator.proposer.ended) == 3


@pytest.mark.parametrize("count", [7, None], ids=["one text each", "forks and constraints too"])
def test_a_draft_model_follows_sequences_that_come_and_go(model, count):
    """The target drafts for itself, so all that it proposes is right; its cache has room for some of the texts only."""
    plain = run(make_engine(model), requests()[:count])
    engine = make_engine(model, token_budget=64)
    engine.speculator = make_speculator(model, model, tokens=100)
    engine.speculator.always = True
    found = run(engine, requests()[:count])
    assert {name: said(pieces) for name, pieces in found.items()} == {n: said(p) for n, p in plain.items()}
    assert engine.speculator.stats.acceptance > (0.5 if count else 0.4)  # penalties and constraints are not the draft's
    proposer = engine.speculator.proposer
    assert not proposer._known  # nothing is kept of sequences that have ended
    proposer._blocks.check()


def test_by_distribution_the_engine_draws_what_the_model_would(model, monkeypatch):
    """Thousands of requests, whose second tokens are proposed by a model that is often wrong: each pair of tokens comes
    as often as the model's own probabilities say. The test fails if the draft's are falsified.
    """
    draft = tiny_llama()
    torch.nn.init.zeros_(draft.blocks[-1].mlp.down.weight)
    params = SamplingParams(temperature=1.3, top_k=4, max_new_tokens=3, ignore_eos=True)
    settings, count = RowParams.stack([params], vocab_size=300), 3000
    context = TrainingContext([layer.window for layer in model.config.layers])

    def chances(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], context)[0, -1:]
        return process(logits, settings).softmax(-1)[0]

    first = chances(PROMPT)
    expected = {
        (one, two): float(first[one] * second[two])
        for one in first.nonzero().flatten().tolist()
        for second in [chances([*PROMPT, one])]
        for two in second.nonzero().flatten().tolist()
    }

    def chi_square():
        engine = make_engine(model, blocks=2000, max_sequences=100, token_budget=1000, queue_limit=count)
        engine.speculator = make_speculator(model, draft, accept="distribution")
        engine.speculator.always = True
        all_requests = [request(str(seed), PROMPT, params=replace(params, seed=seed)) for seed in range(count)]
        found = run(engine, all_requests, check=False)
        pairs = Counter(tuple(tokens_of(pieces)[:2]) for pieces in found.values())
        assert engine.speculator.stats.acceptance > 0.1
        assert set(pairs) <= set(expected)
        return sum((pairs[pair] - count * share) ** 2 / (count * share) for pair, share in expected.items())

    assert len(expected) == 16
    assert chi_square() < 37.7  # of 15 degrees of freedom: above it in one of a thousand runs
    own = Speculator.probabilities
    monkeypatch.setattr(Speculator, "probabilities", lambda self, number: [q.square() for q in own(self, number)])
    assert chi_square() > 37.7


def test_suffix_learns_from_answers_of_its_tenant(model):
    engine = make_engine(model, token_budget=64)
    engine.speculator = make_speculator(model, "suffix")
    engine.speculator.always = True
    steps = []
    for salt in ("a", "a", "b"):
        before = engine.stats().steps
        run(engine, [request("x", PROMPT, max_new_tokens=24, salt=salt)])
        steps.append(engine.stats().steps - before)
    assert steps[1] < steps[0] == steps[2]


@pytest.mark.parametrize("cache", ["auto", "int4"])
def test_json_by_a_schema_is_the_same_with_drafts(model, cache):
    """The grammar is walked along a draft, right or wrong, and back where it was rejected."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["one", "two"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }

    async def grammar():
        grammars = Grammars(model.tokenizer, vocabulary=300, eos_ids={90}, settings=ServerSettings())
        try:
            return await grammars.constraint(schema, param="response_format")
        finally:
            grammars.close()

    constraint = asyncio.run(grammar())

    def asked():
        own = {"max_new_tokens": 80, "ignore_eos": False, "temperature": 1.0}
        return [request(f"{n}", PROMPT, constraint=constraint.fork(), seed=n, **own) for n in range(4)]

    plain = {name: said(pieces) for name, pieces in run(make_engine(model, kv_cache_dtype=cache), asked()).items()}
    texts = [PROMPT + sample[0] for samples in plain.values() for sample in samples.values()]
    chance = random.Random(3)

    def propose(text):
        known = [one[len(text.tokens) :] for one in texts if one[: len(text.tokens)] == list(text.tokens)]
        draft = chance.choice(known)[: chance.randrange(6)] if known else []
        return [*draft, chance.randrange(300)] if chance.random() < 0.5 else draft

    engine = make_engine(model, kv_cache_dtype=cache)
    engine.speculator = proposing(propose)
    assert {name: said(pieces) for name, pieces in run(engine, asked()).items()} == plain
    assert json.loads(plain["0"][0][1]).keys() == {"name", "kind"}
    stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 20
