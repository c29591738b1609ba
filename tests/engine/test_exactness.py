"""What a request gets does not depend on who else is served, on chunks, cached prompts, preemption or forks."""

import functools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from drafting import proposing
from hasten.engine.params import SamplingParams
from hasten.model.fused import refusal
from references import make_reference, tiny_llama
from serving_cases import make_engine, reason_of, request, run, tokens_of

TEXT = [7, 3, 90, 41, 12, 55, 8, 8, 23, 60, 71, 5, 33, 18, 99, 2, 64, 29, 77, 50] * 4


@functools.cache
def exact_model(name: str):
    return hasten.load(make_reference(name), dtype="float32")


@functools.cache
def alone(name: str, prompt: tuple[int, ...], length: int, seed: int | None) -> list[int]:
    params = own_params(length, seed)
    return hasten.generate(exact_model(name), list(prompt), params)[0].tokens


def own_params(length: int, seed: int | None) -> SamplingParams:
    drawn = {"temperature": 0} if seed is None else {"temperature": 0.9, "top_p": 0.95, "seed": seed}
    return SamplingParams(max_new_tokens=length, ignore_eos=True, **drawn)


ARRIVAL = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 40),  # tokens of a common beginning
        "own": st.integers(1, 20),
        "length": st.integers(1, 24),
        "n": st.sampled_from([1, 1, 3]),
        "seed": st.sampled_from([None, None, 5]),
        "pause": st.integers(0, 3),
        "abort_after": st.sampled_from([None, None, None, 0, 3]),
        "priority": st.sampled_from([0, 0, 1]),
    }
)


def test_everybody_gets_what_they_get_alone():
    """The examples are always the same ones; what they are about must have come to pass in them, many times."""
    happened = Counter()

    @settings(max_examples=50, derandomize=True, database=None)
    @given(
        name=st.sampled_from(["llama", "mistral"]),
        arrivals=st.lists(ARRIVAL, min_size=3, max_size=9),
        blocks=st.integers(21, 32),
        budget=st.integers(6, 48),
        prefix_cache=st.booleans(),
    )
    def serve(name, arrivals, blocks, budget, prefix_cache):
        happened.update(serve_and_compare(name, arrivals, blocks, budget, prefix_cache))

    serve()
    for what in ("preempted", "found in the cache", "copied at a write", "forked", "aborted", "in chunks", "guessed"):
        assert happened[what] >= 10, f"{what}: {happened[what]} times in {happened['requests']} requests"


def serve_and_compare(name, arrivals, blocks, budget, prefix_cache):
    """One engine, requests that come and go; how often what happened in it."""
    engine = make_engine(
        exact_model(name), blocks=blocks, token_budget=budget, max_sequences=6, prefix_cache=prefix_cache
    )
    chance = random.Random(0)
    wanted, found, doomed, known = {}, {}, [], []
    steps = aborted = 0

    def guess(sequence):
        """Wrong ones, and right ones with a wrong one behind them."""
        at = len(sequence.tokens)
        right = next((text[at : at + 2] for text in known if text[:at] == sequence.tokens), [])
        return [*(right if chance.random() < 0.3 else []), *chance.choices(TEXT, k=chance.randrange(3))]

    engine.speculator = proposing(guess)

    def step():
        nonlocal steps, aborted
        steps += 1
        for name, when in doomed:
            if steps == when:
                before = engine.blocks.free
                engine.abort(name)
                aborted += engine.blocks.free > before  # it had begun
                wanted.pop(name, None)
        for piece in engine.step():
            found.setdefault(piece.request_id, []).append(piece)
        engine.check()

    for number, a in enumerate(arrivals):
        prompt = (*TEXT[: a["shared"]], *(1 + (7 * number + i) % 100 for i in range(a["own"])))
        params = own_params(a["length"], a["seed"])
        one = request(str(number), prompt, params=params, n=a["n"], priority=a["priority"])
        engine.add(one)
        wanted[one.id] = [
            alone(name, prompt, a["length"], None if a["seed"] is None else a["seed"] + i) for i in range(a["n"])
        ]
        known += [[*prompt, *text] for text in wanted[one.id]]
        if a["abort_after"] is not None:
            doomed.append((one.id, steps + 1 + a["abort_after"]))
        for _ in range(a["pause"]):
            step()
    while not engine.idle:
        step()
    for name, texts in wanted.items():
        assert [tokens_of(found[name], index) for index in range(len(texts))] == texts
        assert {reason_of(found[name], index) for index in range(len(texts))} == {"length"}
    assert engine.blocks.free == blocks
    stats = engine.stats()
    return {
        "requests": len(arrivals),
        "preempted": stats.preemptions,
        "found in the cache": stats.prefix_hits,
        "copied at a write": stats.copied_blocks,
        "forked": sum(len(texts) - 1 for texts in wanted.values()),
        "aborted": aborted,
        "in chunks": sum(a["shared"] + a["own"] > budget for a in arrivals),
        "guessed": sum(len(piece.tokens) > 1 for pieces in found.values() for piece in pieces),
    }


def test_right_guesses_save_steps():
    model = exact_model("llama")
    prompt = tuple(TEXT[:11])
    wanted = alone("llama", prompt, 16, None)
    engine = make_engine(model, token_budget=32)
    whole = list(prompt) + wanted
    engine.speculator = proposing(lambda text: whole[len(text.tokens) : len(text.tokens) + 3])
    found = run(engine, [request("a", prompt, max_new_tokens=16)])["a"]
    assert tokens_of(found) == wanted
    assert engine.stats().steps == 1 + -(-15 // 4)
    assert max(len(piece.tokens) for piece in found) == 4


@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "with drafts"])
@pytest.mark.parametrize(
    ("weights", "rows"),
    [
        ("bfloat16", "auto"),
        ("int8", "auto"),
        ("int4", "auto"),
        ("bfloat16", "int4"),
        ("int4", "int8"),
        ("int8", "int4"),
    ],
)
def test_the_native_kernels_give_the_same_bits_beside_anybody(weights, rows, drafts):
    """In any batch, through paging, preemption and prefix hits, and whatever was proposed, right or wrong."""
    model = tiny_llama().bfloat16()
    if weights != "bfloat16":
        hasten.quantize(model, hasten.Int8() if weights == "int8" else hasten.Int4(group_size=32))
    if reason := refusal(model):
        pytest.skip(reason)
    hasten.fuse(model)
    cache = {"kv_cache_dtype": rows}
    chance = random.Random(1)
    prompt = [chance.randrange(300) for _ in range(45)]
    settings = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.2},
    ]

    def probe(number):
        params = SamplingParams(max_new_tokens=20, ignore_eos=True, **settings[number])
        return request(f"probe {number}", prompt, params=params, logprobs=3)

    def said(pieces):
        return [(told.token, told.logprob, told.top) for piece in pieces for told in piece.logprobs]

    wanted = [
        said(run(make_engine(model, token_budget=64, **cache), [probe(number)])[f"probe {number}"])
        for number in range(3)
    ]
    if rows == "int4":
        assert wanted[0] != said(run(make_engine(model, token_budget=64), [probe(0)])["probe 0"])
    texts = [[*prompt, *(token for token, _, _ in told)] for told in wanted]

    def propose(text):
        known = [one[len(text.tokens) :] for one in texts if one[: len(text.tokens)] == list(text.tokens)]
        draft = chance.choice(known)[: chance.randrange(6)] if known else [chance.randrange(300)]
        return [*draft, chance.randrange(300)] if chance.random() < 0.3 else draft

    counts = [0, 0, 0]
    for budget, blocks, warm in ((8, 60, False), (13, 40, True), (40, 200, True), (9, 24, False)):
        engine = make_engine(model, token_budget=budget, blocks=blocks, **cache)
        if drafts:
            engine.speculator = proposing(propose)
        if warm:  # the prompt, or a part of it, lies in the cache
            run(engine, [request("warm", prompt[: chance.randrange(20, 46)], max_new_tokens=3)])
        found = {}
        for number in range(9):
            engine.add(
                probe(number // 3)
                if number % 3 == 1
                else request(
                    f"neighbour {number}",
                    [chance.randrange(300) for _ in range(chance.randrange(1, 40))],
                    max_new_tokens=chance.randrange(1, 20),
                    temperature=1.0,
                )
            )
            for _ in range(chance.randrange(4)):
                for piece in engine.step():
                    found.setdefault(piece.request_id, []).append(piece)
        for name, pieces in run(engine).items():
            found.setdefault(name, []).extend(pieces)
        for number in range(3):
            assert said(found[f"probe {number}"]) == wanted[number], (budget, number)
        stats = engine.stats()
        counts = [
            a + b for a, b in zip(counts, (stats.preemptions, stats.prefix_hits, stats.accepted_tokens), strict=True)
        ]
    assert all(counts[:2]), counts
    assert counts[2] > 20 if drafts else counts[2] == 0


def test_beams_and_samples_over_an_int8_cache_are_the_same_bits_beside_anybody():
    """Forks, copies on write, preemption and adopted prompts, where every byte of a shared block counts."""
    model = tiny_llama().bfloat16()
    if reason := refusal(model):
        pytest.skip(reason)
    hasten.fuse(model)
    chance = random.Random(2)
    probes = [
        request("beams", TEXT[:30], beam_width=4, n=4, max_new_tokens=12),
        request("samples", TEXT[:27], temperature=1.0, seed=3, n=3, max_new_tokens=12, logprobs=1),
    ]

    def said(pieces):
        return sorted((p.index, p.tokens, [told.logprob for told in p.logprobs or ()]) for p in pieces)

    wanted = {one.id: said(run(make_engine(model, kv_cache_dtype="int8"), [one])[one.id]) for one in probes}
    counts = [0, 0, 0]
    for budget, blocks in ((30, 26), (16, 40), (32, 200)):
        engine = make_engine(model, token_budget=budget, blocks=blocks, max_sequences=9, kv_cache_dtype="int8")
        others = [
            request(f"other {i}", [*TEXT[: 4 * i], *(chance.randrange(300) for _ in range(9))], max_new_tokens=24)
            for i in range(5)
        ]
        found = run(engine, [*others[:3], *probes, *others[3:]])
        assert {name: said(found[name]) for name in wanted} == wanted
        stats = engine.stats()
        counts = [
            a + b for a, b in zip(counts, (stats.preemptions, stats.copied_blocks, stats.prefix_hits), strict=True)
        ]
    assert all(counts), counts


def test_prompt_logprobs_are_the_models_own_however_it_is_read():
    model = exact_model("llama")
    prompt = TEXT[:30]
    logits = model(torch.tensor([prompt]), torch.arange(30)[None], context_of(model))[0]
    wanted = logits.log_softmax(-1)[range(29), prompt[1:]]
    engine = make_engine(model, token_budget=8)
    for name in "ab":  # the second would find its prompt in the cache
        first = run(engine, [request(name, prompt, max_new_tokens=2, prompt_logprobs=1)])[name][0]
        assert first.prompt_logprobs[0] is None
        found = torch.tensor([told.logprob for told in first.prompt_logprobs[1:]])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        assert [told.token for told in first.prompt_logprobs[1:]] == prompt[1:]


def context_of(model):
    from hasten.model.context import TrainingContext

    return TrainingContext([layer.window for layer in model.config.layers])
