"""Speculative decoding: the text is the same with any draft, and the drafts that pay are proposed."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import hasten
from drafting import proposing, wrong
from hasten.engine.cache import KVCache, row_format
from hasten.engine.generate import Generation
from hasten.engine.given_texts import GivenTexts
from hasten.engine.layout import Rows
from hasten.engine.params import SamplingParams
from hasten.engine.speculation import (
    Draft,
    Price,
    Speculator,
    SuffixProposer,
    Text,
    make_speculator,
    suffix,
)
from hasten.engine.speculation.build import automatic
from hasten.engine.speculation.suffix import SALTS
from hasten.errors import ConfigError
from hasten.model.fused import refusal
from references import make_reference, tiny_llama

PROMPTS = [[5, 9, 13, 9, 13, 7], [3, 4], [90, 91, 92, 93, 94, 95, 96, 97, 91, 92]]
SETTINGS = {
    "greedy": {"temperature": 0},
    "draws": {"temperature": 0.9},
    "filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0, "frequency_penalty": 0.7},
    "bias": {"temperature": 0.8, "logit_bias": {7: 3.0, 9: -5.0}},
    "minimum": {"temperature": 1.0, "min_new_tokens": 12, "stop_token_ids": (7, 11, 13, 40, 41, 42)},
    "stop ids": {"temperature": 1.0, "stop_token_ids": tuple(range(40, 60))},
}


def knowing(texts, *, mistakes, most=6, seed=0):
    """Proposes the tokens of known texts, by the number of the sequence, with mistakes."""
    chance = random.Random(seed)

    def propose(text):
        known = texts[text.number - 1][len(text.tokens) :][: chance.randint(0, most)]
        return [(token + 1) % 101 if chance.random() < mistakes else token for token in known]

    return proposing(propose)


@pytest.fixture(scope="module")
def model():
    return hasten.load(make_reference("llama"), dtype="float32")


def texts_of(model, params, speculator=None, prompts=PROMPTS, **settings):
    run = Generation(model, prompts, params, speculator=speculator, **settings)
    for _ in run:
        pass
    return run.results()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_text_is_the_same_with_any_draft(model, settings):
    params = [SamplingParams(max_new_tokens=24, seed=seed, **settings) for seed in (1, 2, 3)]
    plain = texts_of(model, params)
    known = [prompt + result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)]
    for mistakes in (0.0, 0.3, 1.0):
        speculator = knowing(known, mistakes=mistakes)
        assert texts_of(model, params, speculator) == plain
        stats = speculator.stats
        assert stats.draft_tokens > 4
        if mistakes == 0:  # all are right, but for what stands behind the end of a text
            assert stats.accepted_tokens >= stats.draft_tokens - 6
        else:
            assert stats.accepted_tokens < stats.draft_tokens
    assert texts_of(model, params, Speculator(SuffixProposer(), always=True)) == plain


def test_drafts_are_named_in_any_case(model):
    assert make_speculator(model, "None") is None
    assert make_speculator(model, "SUFFIX").proposer.name == "suffix"
    assert make_speculator(model, "Self:1-Layers").proposer.name == "self:1-layers"
    with pytest.raises(ConfigError, match="the draft mtp is for models with a multi-token head"):
        make_speculator(model, "MTP")


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_the_text_is_the_same_where_layers_have_windows(family):
    """Of 6 or 7 tokens: what was rejected may not have pushed out what the window still sees."""
    model = hasten.load(make_reference(family), dtype="float32")
    params = [SamplingParams(max_new_tokens=24, seed=seed, temperature=0.8) for seed in (1, 2, 3)]
    plain = texts_of(model, params)
    known = [prompt + result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)]
    speculator = knowing(known, mistakes=0.3, most=12)
    assert texts_of(model, params, speculator) == plain
    assert 0 < speculator.stats.accepted_tokens < speculator.stats.draft_tokens


def test_texts_go_on_and_end_where_drafts_are_hardly_made(model, monkeypatch):
    params = [SamplingParams(max_new_tokens=n, temperature=0.9, seed=1, ignore_eos=True) for n in (60, 110, 200)]
    plain = texts_of(model, params)
    speculator = wrong(monkeypatch)
    assert texts_of(model, params, speculator) == plain
    stats = speculator.stats
    assert 0 < stats.drafts < stats.steps / 4
    assert stats.steps == 200
    assert stats.tokens == 60 + 110 + 200
    assert sum(stats.rows.values()) == 200
    assert sorted(speculator.proposer.ended) == [1, 2, 3]


@pytest.fixture(scope="module")
def fused():
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    if reason := refusal(model):
        pytest.skip(reason)
    return hasten.fuse(model)


@pytest.mark.parametrize("draft", ["suffix", "self:1-layers", "the model itself"])
def test_the_native_kernels_give_the_same_bits_with_any_draft(fused, draft):
    for temperature in (0, 0.8):
        params = [SamplingParams(max_new_tokens=24, seed=seed, temperature=temperature) for seed in (1, 2, 3)]
        speculator = make_speculator(fused, fused if draft == "the model itself" else draft)
        speculator.always = True
        assert texts_of(fused, params, speculator) == texts_of(fused, params)
        if draft == "the model itself":  # it draws with the same noise
            assert speculator.stats.acceptance > 0.8  # behind the end of a text some are not taken
            assert speculator.stats.tokens_per_step > 10


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_the_bits_are_the_same_over_a_quantized_cache(fused, kv_cache_dtype):
    params = [SamplingParams(max_new_tokens=24, seed=seed, temperature=0.9) for seed in (1, 2, 3)]
    plain = texts_of(fused, params, kv_cache_dtype=kv_cache_dtype)
    known = [prompt + result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)]
    speculator = knowing(known, mistakes=0.3)
    assert texts_of(fused, params, speculator, kv_cache_dtype=kv_cache_dtype) == plain
    assert 0 < speculator.stats.accepted_tokens < speculator.stats.draft_tokens


@pytest.mark.parametrize("weights", [hasten.Int8(), hasten.Int4(group_size=32)])
def test_the_bits_are_the_same_with_quantized_weights(weights):
    model = hasten.quantize(hasten.load(make_reference("llama"), dtype="bfloat16"), weights)
    if reason := refusal(model):
        pytest.skip(reason)
    hasten.fuse(model)
    params = [SamplingParams(max_new_tokens=24, seed=seed, temperature=0.9) for seed in (1, 2, 3)]
    plain = texts_of(model, params)
    known = [prompt + result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)]
    assert texts_of(model, params, knowing(known, mistakes=0.3)) == plain


def test_an_end_inside_a_draft_ends_the_text(model):
    long = texts_of(model, SamplingParams(max_new_tokens=24, temperature=1.0, seed=1, ignore_eos=True))
    known = [prompt + result.tokens for prompt, result in zip(PROMPTS, long, strict=True)]
    ends = tuple({result.tokens[n] for n, result in enumerate(long, start=9)})
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=1, stop_token_ids=ends)
    plain = texts_of(model, params)
    assert {result.finish_reason for result in plain} == {"stop"}
    assert texts_of(model, params, knowing(known, mistakes=0.0, most=24)) == plain


def test_a_draft_model_forgets_a_text_that_was_left(fused):
    """Closed early, and another text under the same number with other settings: it agrees with itself again."""
    speculator = make_speculator(fused, fused)
    speculator.always = True
    for seed in (1, 2):
        before = speculator.stats.draft_tokens, speculator.stats.accepted_tokens
        params = SamplingParams(max_new_tokens=60, seed=seed, temperature=1.0, ignore_eos=True)
        run = iter(Generation(fused, [PROMPTS[seed]], params, speculator=speculator))
        for _ in range(3):
            next(run)
        run.close()
        drafted, taken = speculator.stats.draft_tokens - before[0], speculator.stats.accepted_tokens - before[1]
        assert taken == drafted > 10


@pytest.mark.parametrize("rows", ["auto", "int8", "int4"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("more", [[], [9, 1, 2]])  # without and with drafts of the same length
def test_what_was_rejected_leaves_no_trace(kind, rows, more, request):
    """The cache is that of a run which never proposed it: on the native kernels to the bit."""
    model = request.getfixturevalue("model" if kind == "plain" else "fused")
    decoders = [GivenTexts(model, batch=2, capacity=40, kv_cache_dtype=rows) for _ in range(2)]
    for decoder in decoders:
        decoder.prefill([PROMPTS[0], PROMPTS[2]])
    decoders[0].verify([[4, 5, 6, 7], [8, *more]])
    decoders[0].truncate([len(PROMPTS[0]) + 2, len(PROMPTS[2]) + 1])
    decoders[1].decode(torch.tensor([4, 8]))
    decoders[1].decode(torch.tensor([5, 0]), active=[True, False])
    found = [decoder.decode(torch.tensor([9, 10])) for decoder in decoders]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0 if kind == "fused" else 1e-5)
    assert decoders[0].lengths == decoders[1].lengths


@pytest.mark.parametrize("rows", ["auto", "int8", "int4"])
@torch.inference_mode()
def test_what_was_rejected_leaves_no_trace_in_blocks(fused, rows):
    table, prompt, found = [3, 0, 5], PROMPTS[2], []
    for drafts in ([4, 5, 6, 7], [4, 5]):  # the last two are rejected, and written over
        cache = KVCache(
            fused.config, blocks=6, block_size=8, dtype=torch.bfloat16, device="cpu", row_format=row_format(rows)
        )
        for start, tokens in ((0, prompt), (len(prompt), drafts), (len(prompt) + 2, [9, 10])):
            step = cache.step([Rows(table, start, len(tokens))])
            logits = fused(torch.tensor([tokens]), step.positions, step)
        found.append(logits)
    assert torch.equal(*found)


def test_longrope_is_computed_anew_where_a_text_outgrows_its_context():
    """No draft goes past that place, so the text is the plain one's."""
    model = hasten.load(make_reference("phi3-longrope"), dtype="float32")
    at = next(rope.original_positions for rope in model.config.ropes if rope.scaling == "longrope")
    prompts = [[3 + i % 90 for i in range(at - before)] for before in (9, 12, 4)]
    params = SamplingParams(max_new_tokens=16, temperature=0)
    plain = texts_of(model, params, prompts=prompts)
    known = knowing([p + r.tokens for p, r in zip(prompts, plain, strict=True)], mistakes=0.1)
    assert texts_of(model, params, known, prompts=prompts) == plain


def test_suffix_takes_what_followed_the_longest_match():
    proposer = SuffixProposer()
    text = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 8, 1, 2, 3, 4]
    assert drafted(proposer, text, room=4) == [5, 9, 2, 3]  # 1 2 3 4 stands there, 9 2 3 4 is shorter
    assert drafted(proposer, [*text, 6], room=9) == [8, 1, 2, 3, 4, 6]
    assert drafted(proposer, [*text, 6, 70], room=4) == []
    proposer.end(0, [6, 70, 71, 72], salt="a")
    assert drafted(proposer, [6, 70], room=4, number=1, salt="a") == [71, 72]
    assert drafted(proposer, [6, 70], room=4, number=2, salt="b") == []  # another tenant's


def test_suffix_takes_what_follows_most_often():
    text = [1, 2, 3, 50, 1, 2, 4, 51, 1, 2, 3, 52, 1, 2]
    assert drafted(SuffixProposer(), text, room=1) == [3]


def test_what_suffix_remembers_of_others_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "SHARED_TOKENS", 100)
    proposer = SuffixProposer()
    for start in range(0, 5000, 10):
        proposer.end(start, list(range(start, start + 10)))
        assert proposer._remembered() <= 200
    assert drafted(proposer, [4990, 4991], room=2, number=-1) == [4992, 4993]
    assert drafted(proposer, [4800, 4801], room=2, number=-2) == [4802, 4803], "the hundred before are there too"
    assert drafted(proposer, [4700, 4701], room=2, number=-3) == []


def test_what_suffix_remembers_of_all_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "ALL_TOKENS", 100)
    proposer = SuffixProposer()
    for number in range(20):
        proposer.end(number, list(range(40)), salt=f"{number}")
    assert list(proposer._earlier) == ["18", "19"]
    monkeypatch.setattr(suffix, "SHARED_TOKENS", 40)
    proposer.end(20, list(range(100, 110)), salt="18")
    assert {salt: [index.tokens[0] for index in kept] for salt, kept in proposer._earlier.items()} == {
        "19": [0],
        "18": [0, 100],
    }
    proposer.end(21, list(range(20)), salt="19")
    assert [index.tokens[0] for index in proposer._earlier["18"]] == [100], "the older half goes first"
    proposer.end(20, list(range(1000)), salt="long")
    assert list(proposer._earlier) == ["long"], "the latest one is kept, whatever it takes"


def test_only_the_latest_tenants_are_remembered():
    proposer = SuffixProposer()
    for number in range(SALTS + 3):
        proposer.end(number, [6, 70, 71, 72], salt=f"{number}")
        assert len(proposer._earlier) == min(number + 1, SALTS)
    assert drafted(proposer, [6, 70], room=4, number=-1, salt="2") == []
    assert drafted(proposer, [6, 70], room=4, number=-2, salt="3") == [71, 72]


def drafted(proposer, tokens, *, room, number=0, salt=""):
    text = Text(number=number, tokens=tokens, step=0, params=SamplingParams(), room=room, salt=salt)
    (draft,) = proposer.propose([text], floor=0.0, chance=lambda kind: 1.0)
    assert len(draft.tokens) == len(draft.kinds)
    return draft.tokens


# -- how many tokens are proposed --------------------------------------------------------------------------------------


class Kinds:
    """Proposes tokens of kind 0, and takes `first` seconds, and `more` for each token but one of the longest draft."""

    name = "kinds"

    def __init__(self, first=0.0, more=0.0):
        self.first, self.more, self.calls, self.now = first, more, 0, 0.0

    def prior(self, kind):
        return 2 / 3

    def propose(self, texts, *, floor, chance):
        lengths = []
        for text in texts:
            length = 0
            while length < text.room and chance(0) ** (length + 1) >= floor:
                length += 1
            lengths.append(length)
        self.calls += 1
        self.now += self.first + self.more * max(0, max(lengths) - 1)
        return [Draft([7] * length, [0] * length) for length in lengths]

    def end(self, number, answer, *, salt=""):
        pass


def line(each):
    """Steps whose further rows each cost this share of the first."""
    return lambda rows: 1 + each * (rows - 1)


class Run:
    """A simulated run: each proposed token is right with the chance `right`, a step over R rows takes `cost(R)`."""

    def __init__(self, cost, *, sequences=1, first=0.0, more=0.0):
        self.cost, self.sequences, self.chance = cost, sequences, random.Random(0)
        self.proposer = Kinds(first, more)
        self.speculator = Speculator(self.proposer, clock=lambda: self.proposer.now)
        self.lengths = []  # of drafts, a list for each step

    def steps(self, count, right, *, room=16):
        for _ in range(count):
            texts = [
                Text(number=n, tokens=[1] * 50, step=2, params=SamplingParams(), room=room)
                for n in range(self.sequences)
            ]
            drafts = self.speculator.propose(texts)
            self.lengths.append([len(draft) for draft in drafts])
            for n, draft in enumerate(drafts):
                taken = 1
                while taken <= len(draft) and self.chance.random() < right:
                    taken += 1
                self.speculator.observe(n, taken, checked=len(draft))
            rows = self.sequences + sum(map(len, drafts))
            self.speculator.stepped(rows, self.cost(rows))
            self.proposer.now += self.cost(rows)
        return self

    @property
    def stats(self):
        return self.speculator.stats

    def length(self, last):
        """The mean length of the drafts of the last steps."""
        found = [length for lengths in self.lengths[-last:] for length in lengths]
        return sum(found) / len(found)

    @property
    def over_plain(self):
        """The time over that of plain steps for the same tokens."""
        return self.proposer.now / (self.stats.tokens / self.sequences * self.cost(self.sequences))


def test_suffix_proposes_as_long_as_it_is_likely():
    """Fewer tokens where they are less likely, and where earlier places go on in different ways."""

    def length(tokens, chance, floor=0.5):
        text = Text(number=0, tokens=tokens, step=1, params=SamplingParams(), room=16)
        (draft,) = SuffixProposer().propose([text], floor=floor, chance=chance)
        return len(draft.tokens)

    repeated = [*range(20, 40)] * 2
    assert length(repeated, lambda kind: 0.99) == 16
    assert length(repeated, lambda kind: 0.8) == 3  # 0.8³ is above a half, 0.8⁴ below
    assert length(repeated, lambda kind: 0.4) == 0
    divided = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]  # after 1, 2 comes a 3, and then a 4 or a 5
    assert length(divided, lambda kind: 0.9 if kind % 2 else 0.4) == 1


def test_drafts_are_as_long_as_pays():
    often, seldom = Run(line(0.05)).steps(200, 0.9), Run(line(0.05)).steps(200, 0.4)
    assert often.over_plain < 1 / 3
    assert often.stats.speedup == pytest.approx(1 / often.over_plain, rel=0.05), "what it says of itself"
    assert 5 <= often.length(100) <= 16
    # The most tokens a second: (1 - a^(k+1)) / (1 - a) / (1 + k/20) is largest at k = 2 for a = 0.4.
    assert 1 <= seldom.length(100) <= 3


def test_a_useless_draft_is_hardly_made():
    assert Run(line(0.05)).steps(200, 0.0).length(100) <= 1 / 16
    assert Run(line(1.0)).steps(200, 0.9).length(100) <= 1 / 16, "a row costs what a step costs"
    slow = Run(line(0.05), first=0.6, more=0.6).steps(200, 0.3)  # of a draft model
    assert slow.length(100) <= 1 / 16
    assert slow.proposer.calls < 10


@pytest.mark.parametrize("right", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("first", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("each", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("sequences", [1, 4])
def test_drafts_never_lose_much(right, first, each, sequences):
    """A few plain steps until prices and chances are known, then 1% at most."""
    run = Run(line(each), sequences=sequences, first=first, more=first / 4).steps(100, right)
    begun, tokens = run.proposer.now, run.stats.tokens
    assert begun <= 1.01 * tokens / sequences * run.cost(sequences) + 5 * run.cost(sequences)
    run.steps(1000, right)
    plain = (run.stats.tokens - tokens) / sequences * run.cost(sequences)
    assert run.proposer.now - begun <= 1.01 * plain


def test_a_text_that_becomes_easy_gets_drafts_again():
    for first in (0.0, 0.5):
        run = Run(line(0.05), first=first, more=first / 8).steps(400, 0.0)
        assert run.length(100) <= 1 / 16
        run.steps(600, 0.95)
        assert run.length(100) > 4


@pytest.mark.parametrize("slow", [0.5, 2.0])
def test_steps_that_read_prompts_say_nothing_of_prices(slow):
    run = Run(line(0.05)).steps(20, 0.8)
    before = [run.speculator.price.seconds(rows) for rows in (1, 2, 17, 600)]
    for _ in range(10):
        (draft,) = run.speculator.propose([Text(number=0, tokens=[1], step=2, params=SamplingParams(), room=3)])
        run.speculator.observe(0, 1, checked=len(draft))
        run.speculator.stepped(513 + len(draft), slow)
    assert [run.speculator.price.seconds(rows) for rows in (1, 2, 17, 600)] == before


def test_a_step_that_other_programs_held_up_does_not_silence_good_drafts():
    calls = itertools.count()
    run = Run(lambda rows: 1000.0 if next(calls) in (50, 51) else line(0.05)(rows)).steps(200, 0.9)
    assert run.proposer.now > 1000
    assert run.length(100) > 5


def test_a_full_batch_speculates_less():
    def bends(rows):  # full at 16 rows
        return max(1.0, rows / 16)

    alone, full = Run(bends).steps(200, 0.8), Run(bends, sequences=16).steps(200, 0.8)
    assert alone.length(100) > 6
    assert full.length(100) < 1
    assert full.stats.active < 0.2 < 0.9 < alone.stats.active


def test_prices_follow_what_is_measured():
    price = Price()
    for _ in range(4):
        price.learn(1, 2.0)
    assert price.seconds(1) == pytest.approx(2.0)
    assert 2.0 < price.seconds(2) < price.seconds(17) < 4.0, "believed, before any was measured"
    for _ in range(12):
        price.learn(9, 6.0)
        price.learn(1, 2.0)
    assert price.seconds(9) == pytest.approx(6.0, rel=0.05)
    assert price.seconds(5) == pytest.approx(4.0, rel=0.05)
    assert price.seconds(17) == pytest.approx(10.0, rel=0.05)
    for _ in range(40):  # the machine is busy
        price.learn(9, 12.0)
    assert price.seconds(9) == pytest.approx(12.0, rel=0.05)
    assert price.seconds(1) > 2.2, "slower for all rows"


def test_a_second_speculator_begins_with_what_the_first_learnt(model):
    first = make_speculator(model, "suffix")
    texts_of(model, SamplingParams(max_new_tokens=24, temperature=0), first)
    assert first.price.measured >= 4
    assert make_speculator(model, "suffix").price is first.price


def tokenizer(*tokens):
    return SimpleNamespace(backend=SimpleNamespace(get_vocab=lambda **_: {token: i for i, token in enumerate(tokens)}))


def test_drafts_that_do_not_fit_are_refused(model):
    larger, others = tiny_llama(), hasten.load(make_reference("llama"), dtype="float32")
    others.tokenizer, own = tokenizer("a", "c"), hasten.load(make_reference("llama"), dtype="float32")
    own.tokenizer = tokenizer("a", "b")
    with pytest.raises(ConfigError, match="token 1 is 'c' there and 'b' in the model"):
        make_speculator(own, others)
    for draft, words in (
        (larger, "same vocabulary"),
        ("self:9-layers", "from 1 to"),
        ("self:0-layers", "from 1 to"),
        ("self:half", "self:int4 or self:N-layers"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_speculator(model, draft)
    for speculate in (0, 65, 2.5):
        with pytest.raises(ConfigError, match="speculate"):
            make_speculator(model, "suffix", speculate=speculate)


def test_auto_drafts_only_where_the_text_stays_the_same():
    stack, cpu, cuda = object(), torch.device("cpu"), torch.device("cuda")
    for stack_there, dtype, device, wanted in (
        (None, torch.float32, cpu, "suffix"),
        (stack, torch.bfloat16, cpu, "suffix"),
        (None, torch.bfloat16, cpu, "none"),
        (None, torch.float32, cuda, "none"),
        (stack, torch.bfloat16, cuda, "none"),
    ):
        model = SimpleNamespace(stack=stack_there, dtype=dtype, device=device)
        assert automatic(SimpleNamespace(**vars(model), config=SimpleNamespace(keeps_states=False))) == wanted
        assert automatic(SimpleNamespace(**vars(model), config=SimpleNamespace(keeps_states=True))) == "none"
