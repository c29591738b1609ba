"""Captured steps of the engine, replayed operation by operation on a CPU: the texts of the plain ones."""

import random
from unittest.mock import Mock

import pytest
import torch

import hasten
from captured_steps import Capturer
from drafting import proposing
from hasten.engine import ahead, captures, following, scheduler
from hasten.engine.adapters import AdapterNumbers
from hasten.model.lora import attach, new_adapter
from hasten.ops.native import library
from references import make_reference, tiny_llama
from serving_cases import Counting, make_engine, reason_of, request, run, text_of, tokens_of
from triton_cases import run_interpreted

PROMPTS = [[7, 3, 90, 41, 12], [18, 99, 3], [64, 29, 77, 50, 51, 64, 29, 77, 2], [5], [8, 8, 23, 60, 71, 5, 33]]
DRAWN = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


@pytest.fixture
def capturing(monkeypatch):
    """Engines made in the test capture their steps."""
    capturer = Capturer()
    monkeypatch.setattr(following, "capture_refusal", lambda model: None)
    monkeypatch.setattr(captures, "cuda_graph", capturer)
    return capturer


def texts(engine, requests):
    found = run(engine, requests)
    assert engine.error is None  # or texts are shorter
    return {name: [tokens_of(pieces, i) for i in {piece.index for piece in pieces}] for name, pieces in found.items()}


def requests_of(**settings):
    return [request(str(i), prompt, **({"max_new_tokens": 5 + 4 * i} | settings)) for i, prompt in enumerate(PROMPTS)]


def both(model, requests, **settings):
    plain = make_engine(model, capture=False, **settings)
    engine = make_engine(model, **settings)
    assert plain.runner.decoder is None
    assert engine.runner.decoder is not None
    expected, found = texts(plain, requests()), texts(engine, requests())
    assert found == expected
    assert not engine.runner.decoder.captures.refused
    return engine


@pytest.mark.parametrize(
    "settings",
    [
        {},
        DRAWN,
        {"temperature": 1.1, "top_k": 20, "seed": 1},
        {"temperature": 1.3, "top_k": 300, "top_p": 0.8, "min_p": 0.01, "seed": 2},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {**DRAWN, "frequency_penalty": 0.7},
        {"min_new_tokens": 4, "ignore_eos": False},
        {"logit_bias": {7: 5.0, 9: -3.0}},
        {**DRAWN, "logit_bias": {7: 5.0}, "min_new_tokens": 3, "ignore_eos": False},
        {**DRAWN, "n": 3},
    ],
    ids=str,
)
def test_texts_are_the_plain_ones(capturing, settings):
    engine = both(tiny_llama(), lambda: requests_of(**settings))
    assert 2 <= len(capturing.recordings) <= 12
    assert engine.stats().steps


def test_rows_of_every_kind_together(capturing):
    kinds = [{}, DRAWN, {"temperature": 1.2, "top_k": 5, "seed": 9}, {"presence_penalty": 1.0}, {"min_new_tokens": 9}]
    rows = [{"max_new_tokens": 20 - i, "ignore_eos": False, **kind} for i, kind in enumerate(kinds)]
    both(tiny_llama(), lambda: [request(str(i), PROMPTS[i], **row) for i, row in enumerate(rows)])


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2", "gemma3_text", "qwen3"])
def test_families(capturing, family):
    both(hasten.load(make_reference(family), dtype="float32"), requests_of)


@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_rounded_caches(capturing, cache):
    both(tiny_llama(), requests_of, kv_cache_dtype=cache)


def test_adapters(capturing):
    """A step of one adapter, or of none, is captured; one of several runs plainly."""

    def model():
        own = tiny_llama()
        adapters = [new_adapter(own.config, rank=4, alpha=8, targets=["all-linear"], seed=i) for i in range(2)]
        for factors in (one for adapter in adapters for one in adapter.values()):
            torch.nn.init.normal_(factors.b, std=0.2, generator=torch.Generator().manual_seed(factors.b.numel()))
        attach(own, adapters)
        return own

    def requests_with(*names):
        return [request(str(i), PROMPTS[i], adapter=name, max_new_tokens=16) for i, name in enumerate(names)]

    def served(*names, **settings):
        engine = make_engine(model(), **settings)
        engine.adapters = AdapterNumbers(["a", "b"])
        return texts(engine, requests_with(*names)), engine

    found = {}
    for names in (("a", "a", "a"), ("b", "b", "b"), ("", "", ""), ("a", "", "b")):
        expected, _ = served(*names, capture=False)
        found[names], engine = served(*names)
        assert found[names] == expected
        captured = {key.shape.sequences for key in engine.runner.decoder.forwards()}
        assert (4 in captured) == (len(set(names)) == 1)
    assert len({str(one) for one in found.values()}) == 4


def test_constraints_beams_and_embeddings(capturing):
    def requests():
        return [
            request("free", PROMPTS[0], max_new_tokens=12),
            request("bound", PROMPTS[1], max_new_tokens=12, constraint=Counting(40, 6)),
            request("beams", PROMPTS[2], max_new_tokens=8, beam_width=3),
            request("last", PROMPTS[3], max_new_tokens=25),
        ]

    engine = both(tiny_llama(), requests)
    state = engine.embed(PROMPTS[0])
    assert torch.equal(state, make_engine(tiny_llama(), capture=False).embed(PROMPTS[0]))


def test_prompts_are_read_while_tokens_are_awaited(capturing):
    """Steps of other prompts are launched before the first tokens of some are read; long ones are waited for."""
    model, many = tiny_llama(), [[i + 1] * (5 + i % 7) for i in range(20)]

    def requests():
        return [request(str(i), prompt, max_new_tokens=6 + i % 5, **DRAWN) for i, prompt in enumerate(many)]

    expected = texts(make_engine(model, capture=False), requests())
    for limit, some in ((1e9, True), (0.0, False)):
        engine, late = make_engine(model), 0
        arrived = Mock(wraps=engine.ahead.arrived)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "_SHORT", limit)
            patch.setattr(engine.ahead, "arrived", arrived)
            engine.ahead._short = limit > 0
            for one in requests():
                engine.add(one)
            found = {}
            while not engine.idle:
                before, pieces = engine.ahead.late, engine.step()
                late += before is not None and engine.ahead.late is not None
                engine.check()
                for piece in pieces:
                    found.setdefault(piece.request_id, []).append(piece)
        assert {name: [tokens_of(pieces)] for name, pieces in found.items()} == expected
        assert bool(late) == some
        assert arrived.called == some, "a run is begun behind tokens on their way"


def test_requests_that_wait_begin_some_at_a_time(capturing, monkeypatch):
    """So that steps launched ahead come between; nobody waits longer where the slots were not all taken."""
    model = tiny_llama()

    def requests():
        return [request(str(i), [i + 1] * (5 + i % 7), max_new_tokens=6 + 5 * i % 23) for i in range(50)]

    expected, steps = texts(make_engine(model, capture=False, max_sequences=16, token_budget=64), requests()), []
    for patience in (0, 8):
        monkeypatch.setattr(scheduler, "_PATIENCE", patience)
        engine = make_engine(model, max_sequences=16, token_budget=64)
        for one in requests():
            engine.add(one)
        ahead, found = 0, {}
        while not engine.idle:
            for piece in engine.step():
                found.setdefault(piece.request_id, []).append(piece)
            ahead += engine.ahead.flight is not None
            engine.check()
        assert {name: [tokens_of(pieces)] for name, pieces in found.items()} == expected
        steps.append((ahead, engine.stats().steps))
    assert steps[1][0] > 1.2 * steps[0][0]
    assert steps[1][1] < 1.3 * steps[0][1]


def test_what_the_host_decides(capturing):
    """Log-probabilities: captured forward passes, drawn for on the host."""
    engine = both(tiny_llama(), lambda: requests_of(logprobs=2))
    assert len(engine.runner.decoder.forwards()) == len(engine.runner.decoder.captures.pieces)


def test_drafts(capturing):
    """Of several lengths, right and wrong, beside rows without."""
    model, chance = tiny_llama(), random.Random(0)
    wanted = texts(make_engine(model, capture=False), requests_of())
    known = [[*prompt, *wanted[str(i)][0]] for i, prompt in enumerate(PROMPTS)]

    def guess(sequence):
        at = len(sequence.tokens)
        right = next((text[at : at + 3] for text in known if text[:at] == sequence.tokens), [])
        return [*(right if chance.random() < 0.6 else []), *chance.choices(range(200), k=chance.randrange(3))]

    engine = make_engine(model, max_sequences=6)
    engine.speculator = proposing(guess)
    assert texts(engine, requests_of()) == wanted
    shapes = {key.shape.width for key in engine.runner.decoder.forwards()}
    assert max(shapes) >= 4


def test_a_cache_that_is_full_and_a_prefix_that_is_shared(capturing):
    def requests():
        common = list(range(20, 33))
        return [request(str(i), [*common, 7 + i], max_new_tokens=30, n=1 + i % 2) for i in range(6)]

    engine = both(tiny_llama(), requests, blocks=30, max_sequences=5)
    assert engine.scheduler.preemptions


def test_requests_that_come_and_go(capturing):
    model = tiny_llama()
    expected = texts(make_engine(model, capture=False), requests_of(**DRAWN, max_new_tokens=18))
    engine = make_engine(model)
    found = {}
    for i, one in enumerate(requests_of(**DRAWN, max_new_tokens=18)):
        engine.add(one)
        if i == 2:
            engine.add(request("gone", [3, 4, 5], max_new_tokens=40))
        if i == 4:
            engine.abort("gone")
        for _ in range(4):
            for piece in engine.step():
                found.setdefault(piece.request_id, []).append(piece)
            engine.check()
    while not engine.idle:
        for piece in engine.step():
            found.setdefault(piece.request_id, []).append(piece)
        engine.check()
    found.pop("gone")
    assert {name: [tokens_of(pieces)] for name, pieces in found.items()} == expected
    assert engine.blocks.free == engine.blocks.blocks


def test_a_run_of_steps_needs_nothing_of_the_host(capturing):
    """Neither tokens nor lengths are copied while the same sequences go on; only blocks that they enter."""
    engine = make_engine(tiny_llama(), block_size=16)
    for i, prompt in enumerate(PROMPTS[:4]):
        engine.add(request(str(i), prompt, max_new_tokens=40))
    for _ in range(12):
        engine.step()
    assert engine.ahead.flight is not None
    batch = engine.runner.decoder.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "fill", None)
        for _ in range(10):
            engine.step()
        assert engine.ahead.flight is not None


@pytest.mark.parametrize("gathered", [False, True])
def test_texts_of_requests_that_are_read_and_of_others(capturing, gathered):
    """Texts that end at every step, some with stop strings; read as they come, gathered, or both in one step."""
    model = tiny_llama()

    def requests(both):
        how = [{}, {"stop": ["e", "an"]}, {"ignore_eos": False}, {**DRAWN, "n": 2}, {"stop_token_ids": (7, 90, 120)}]
        rows = [{"max_new_tokens": 9 + 11 * i, **kind} for i, kind in enumerate(how)]
        return [
            request(str(i), PROMPTS[i], gathered=both and i % 2 == 0, **({"ignore_eos": True} | row))
            for i, row in enumerate(rows)
        ]

    def said(engine, requests):
        found = run(engine, requests)
        return {
            (name, i): ([tokens_of(pieces, i), text_of(pieces, i), reason_of(pieces, i)])
            for name, pieces in found.items()
            for i in {piece.index for piece in pieces}
        }

    expected = said(make_engine(model, capture=False), requests(False))
    engine = make_engine(model)
    assert said(engine, requests(gathered)) == expected
    assert engine.runner.decoder.captures.pieces


def test_sizes_share_the_memory_of_their_logits(capturing):
    engine = make_engine(tiny_llama(), capture_sizes=(8, 4, 1))
    while engine.warm_up():
        pass
    decoder = engine.runner.decoder
    found = [decoder.captures.pieces[key].result for key in decoder.forwards()]
    assert len(found) == 3
    assert len({logits.untyped_storage().data_ptr() for logits in found}) == 1


def test_captured_while_idle(capturing):
    engine = make_engine(tiny_llama(), capture_sizes=(1, 4, 3))
    decoder = engine.runner.decoder
    while decoder.warm_up():
        pass
    assert [key.shape.sequences for key in decoder.forwards()] == [4, 1]
    assert "1, 4" in decoder.explain()
    expected = texts(make_engine(tiny_llama(), capture=False), requests_of())
    assert texts(engine, requests_of()) == expected


def test_only_what_is_missing_and_has_room_is_captured_while_idle(capturing, monkeypatch):
    engine = make_engine(tiny_llama(), capture_sizes=(1, 4))
    decoder = engine.runner.decoder
    assert decoder.warm_up()
    assert len(capturing.recordings) == 1
    decoder._waiting.append(4)  # captured by a request meanwhile
    while decoder.warm_up():
        pass
    assert len(capturing.recordings) == 2
    monkeypatch.setattr(decoder.captures, "full", "9 MiB of the device's memory are free")
    decoder._waiting.append(2)
    while decoder.warm_up():
        pass
    assert len(capturing.recordings) == 2


def test_many_kinds_of_draws_keep_no_forward_pass_out(capturing, monkeypatch, caplog):
    monkeypatch.setattr(captures, "_MOST", 2)
    model = tiny_llama()
    engine = make_engine(model, capture_sizes=(4,))
    while engine.warm_up():
        pass
    for number, settings in enumerate([{}, DRAWN, {"logit_bias": {7: 5.0}}, {**DRAWN, "top_k": 9}]):
        asked = [request(f"{number}-{i}", PROMPTS[i], max_new_tokens=6, **settings) for i in range(3)]
        expected = texts(make_engine(model, capture=False), asked)
        assert texts(engine, asked) == expected
    kinds = [type(key).__name__ for key in engine.runner.decoder.captures.pieces]
    assert kinds.count("DrawKey") == 2
    assert texts(engine, [request("long", PROMPTS[0], max_new_tokens=60)])
    assert [key.shape.sequences for key in engine.runner.decoder.forwards()] == [4, 1]
    assert [record.message for record in caplog.records if "DrawKey" in record.message] == [
        "2 pieces are captured by a DrawKey; further ones are not"
    ]


def test_a_larger_captured_size_serves_until_the_own_one_is_there(capturing):
    model = tiny_llama()
    expected = texts(make_engine(model, capture=False), requests_of())
    engine = make_engine(model, capture_sizes=(8,))
    while engine.warm_up():
        pass
    assert texts(engine, requests_of()) == expected
    assert {key.shape.sequences for key in engine.runner.decoder.forwards()} == {8}
    assert engine.stats().captured_steps == 2  # the forward pass and a draw
    assert engine.stats().capture_seconds > 0
    assert texts(engine, [request("long", PROMPTS[0], max_new_tokens=60)])
    assert {key.shape.sequences for key in engine.runner.decoder.forwards()} == {8, 1}


def test_a_capture_that_fails_is_logged_once_and_the_step_runs_plainly(capturing, monkeypatch, caplog):
    def fails(step, reset, **_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captures, "cuda_graph", fails)
    model = tiny_llama()
    expected = texts(make_engine(model, capture=False), requests_of())
    engine = make_engine(model)
    assert texts(engine, requests_of()) == expected
    assert "not permitted" in caplog.text
    assert "not captured" in engine.runner.decoder.explain()


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
def test_a_fused_model(capturing):
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    both(model, requests_of)
    both(model, lambda: requests_of(**DRAWN))


def test_models_whose_steps_are_not_captured():
    engine = make_engine(tiny_llama())
    assert engine.runner.decoder is None
    assert "CUDA" in engine.runner.uncaptured
    assert make_engine(tiny_llama(), capture=False).runner.uncaptured == "--no-capture"


@pytest.mark.slow(minutes=2)
def test_over_the_kernels_of_a_gpu_in_tritons_interpreter():
    run_interpreted("engine/interpreted_engine.py")
