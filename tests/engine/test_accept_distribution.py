"""Acceptance with min(1, p/q): what comes is distributed as the target's own draws."""

import inspect
import sys
import textwrap

import pytest
import torch

import hasten
from hasten.engine import sampler as sampler_module
from hasten.engine.generate import Generation
from hasten.engine.params import SamplingParams
from hasten.engine.sampler import Sampler, other_seed
from hasten.engine.sampling import RowParams, process
from hasten.engine.speculation import DraftModel, Text, make_speculator
from hasten.errors import ConfigError
from hasten.ops.draw import exponential_noise
from references import make_reference

V, DRAWS = 7, 20_000
PARAMS = SamplingParams(temperature=0.8, top_p=0.97, seed=3)
CHI_SQUARE = 22.46  # of 6 degrees of freedom: above it in one of a thousand runs


def logits_of(seed):
    return torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 2


def tokens_taken(places, target, draft):
    """The first and second token of many draws with a draft of one token each; and what the target draws from."""
    settings = RowParams.stack([PARAMS], vocab_size=V)
    p, q = (process(one, settings).softmax(-1)[0] for one in (target, draft))
    steps = torch.arange(0, 2 * places, 2)
    seeds = torch.full((places,), other_seed(PARAMS.seed))
    noise = exponential_noise(seeds, steps, vocab_size=V)
    drafts = (q.log() - noise.log()).argmax(-1, keepdim=True).tolist()
    sampler = Sampler([PARAMS] * places, [[]] * places, eos_ids=(), vocab_size=V, device=torch.device("cpu"))
    found = sampler.take(
        target.repeat(2 * places, 1), drafts, steps=steps.tolist(), probabilities=[[q] for _ in range(places)]
    )
    return [own[0] for own in found], [own[1] for own in found if len(own) == 2], p, q


def chi_square(tokens, p):
    counts = torch.bincount(torch.tensor(tokens), minlength=V).double()
    expected = p.double() * len(tokens)
    return float(((counts - expected).square() / expected.clamp(min=1e-9)).sum())  # huge for what cannot come


def test_the_distribution_is_the_targets():
    first, second, p, q = tokens_taken(DRAWS, logits_of(0), logits_of(1))
    assert chi_square(first, p) < CHI_SQUARE
    assert chi_square(second, p) < CHI_SQUARE  # after an accepted one, from the target's next row
    assert abs(len(second) / DRAWS - float(torch.minimum(p, q).sum())) < 0.02  # accepted as often as theory says
    assert chi_square(first, q) > 1000


def test_a_broken_rule_is_noticed(monkeypatch):
    """Draws that take the draft's noise for the target's: what is taken and what is drawn anew depend on each other."""
    monkeypatch.setattr(sampler_module, "_STREAM", 0)
    first, _, p, _ = tokens_taken(DRAWS // 4, logits_of(0), logits_of(1))
    assert chi_square(first, p) > CHI_SQUARE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("uniform[found + count] * q >= p", "False"),  # every token is taken
        ("uniform[found + count] * q >= p", "uniform[found + count] >= p"),  # with p, whatever the draft's chance was
        ("(target[found + count] - own[count]).clamp(min=0)", "target[found + count]"),  # another draw, not the rest
    ],
)
def test_each_half_of_the_rule_is_needed(monkeypatch, right, wrong):
    source = textwrap.dedent(inspect.getsource(Sampler._by_distribution))
    assert source.count(right) == 1
    found = {}
    exec(source.replace(right, wrong), vars(sampler_module) | {"__name__": "mutant"}, found)
    monkeypatch.setattr(Sampler, "_by_distribution", found["_by_distribution"])
    first, _, p, _ = tokens_taken(DRAWS, logits_of(0), logits_of(1))
    assert chi_square(first, p) > CHI_SQUARE


@pytest.mark.parametrize(("temperature", "more"), [(0.8, -0.01), (1.5, 0.02)])
def test_it_takes_more_than_the_rule_that_keeps_the_text_where_much_is_possible(monkeypatch, temperature, more):
    """At a low temperature two draws with the same noise agree as often as min(1, p/q) accepts, at a high one less."""
    monkeypatch.setattr(sys.modules[__name__], "PARAMS", SamplingParams(temperature=temperature, seed=3))
    target, draft, places = logits_of(0), logits_of(1), DRAWS // 4
    _, second, _, q = tokens_taken(places, target, draft)
    steps = torch.arange(0, 2 * places, 2)
    noise = exponential_noise(torch.full((places,), PARAMS.seed), steps, vocab_size=V)
    drafts = (q.log() - noise.log()).argmax(-1, keepdim=True).tolist()
    sampler = Sampler([PARAMS] * places, [[]] * places, eos_ids=(), vocab_size=V, device=torch.device("cpu"))
    exact = sampler.take(target.repeat(2 * places, 1), drafts, steps=steps.tolist())
    assert len(second) / places > more + sum(len(own) == 2 for own in exact) / places


def test_what_is_proposed_does_not_depend_on_what_was_drawn():
    """A draft that is cut where it is unsure is cut by its distribution: the tokens alone do not decide."""
    model = hasten.load(make_reference("llama"), dtype="float32")
    for seed in (1, 2):
        proposer = DraftModel(model, tokens=2048, accept="distribution")
        params = [SamplingParams(seed=100 * seed + n) for n in range(40)]
        texts = [Text(number=n, tokens=[3, 4, 5], step=0, params=own, room=1) for n, own in enumerate(params)]
        drafts = proposer.propose(texts, floor=0.0, chance=lambda kind: 1.0)
        assert len({draft.tokens[0] for draft in drafts}) > 5
        assert len({draft.kinds[0] for draft in drafts}) == 1


def test_greedy_texts_stay_the_same_and_others_follow_the_seed():
    model, draft = (hasten.load(make_reference("llama"), dtype="float32") for _ in range(2))
    for block in draft.blocks[1:]:  # a draft that agrees now and then
        torch.nn.init.zeros_(block.mlp.down.weight)
    for temperature in (0, 1.0):
        settings = {"max_new_tokens": 20, "temperature": temperature, "seed": 5}
        plain = hasten.generate(model, [[3, 4, 5]], **settings)
        texts = []
        for _ in range(2):
            speculator = make_speculator(model, draft, accept="distribution")
            speculator.always = True
            run = Generation(model, [[3, 4, 5]], speculator=speculator, **settings)
            for _ in run:
                pass
            texts.append(run.results())
            assert 0 < speculator.stats.acceptance < 1
        assert texts[0] == texts[1]
        assert (texts[0] == plain) == (temperature == 0)
    with pytest.raises(ConfigError, match="gives no probabilities"):
        make_speculator(model, "suffix", accept="distribution")


def taken_by_the_rule(logits, draft, q, params, step):
    """One row, one token after the other: accepted with min(1, p/q), else replaced by a draw from what p has more."""
    settings, seed = RowParams.stack([params], vocab_size=V), torch.tensor([params.seed])
    for place, token in enumerate(draft):
        at = torch.tensor([step + place])
        p = process(logits[place : place + 1], settings).softmax(-1)[0]
        uniform = (-exponential_noise(seed + 2 * sampler_module._STREAM, at, vocab_size=1)).exp().item()
        if uniform * q[place][token] >= p[token]:
            noise = exponential_noise(seed, at, vocab_size=V)[0]
            rest = (p - q[place]).clamp(min=0)
            return [*draft[:place], int((rest.log() - noise.log()).argmax())]
    last = Sampler([params], [[]], eos_ids=(), vocab_size=V, device=torch.device("cpu"))
    return [*draft, *last.next_tokens(logits[len(draft) :], steps=[step + len(draft)]).tolist()]


def test_drafts_of_any_length_are_taken_by_the_rule_in_any_company():
    """A row whose draft has no probabilities takes what is drawn at its places instead."""
    generator, found = torch.Generator().manual_seed(0), []
    lengths, steps = [0, 3, 1, 5, 2], [7, 0, 4, 2, 9]
    for round in range(20):
        params = [SamplingParams(temperature=0.9, top_p=0.97, seed=100 * round + n) for n in range(5)]
        logits = torch.randn(5 + sum(lengths), V, generator=generator)
        near = [
            torch.softmax(own[:-1] + torch.randn(len(own) - 1, V, generator=generator) / 2, -1)
            for own in logits.split([1 + length for length in lengths])
        ]
        drafts = [torch.multinomial(q, 1, generator=generator).flatten().tolist() if len(q) else [] for q in near]
        probabilities = [list(q) for q in near]
        probabilities[4] = []
        settings = {"eos_ids": (), "vocab_size": V, "device": torch.device("cpu")}
        taken = Sampler(params, [[]] * 5, **settings).take(logits, drafts, steps=steps, probabilities=probabilities)
        for row, own in enumerate(logits.split([1 + length for length in lengths])):
            if row == 4:
                wanted = Sampler([params[row]], [[]], **settings).take(own, [drafts[row]], steps=[steps[row]])[0]
            else:
                wanted = taken_by_the_rule(own, drafts[row], near[row], params[row], steps[row])
            assert taken[row] == wanted
            found.append(len(wanted) - 1 - len(drafts[row]))
    assert min(found) < -2, "some drafts are refused early"
    assert max(found) == 0, "others are taken whole"
